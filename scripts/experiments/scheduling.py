"""Does entropy serve requests in a better order than rules that know none?

Lengths and arrivals are those of a recorded trace (Mooncake, FAST'25), scaled down to the model: prompts and answers by
constant factors, time so that requests bring `load` times the tokens that the steps can produce while they arrive. All
requests that have come are in the cache and every step serves the few of highest priority, so that the rule alone
decides; time is counted in steps, so that the figures do not depend on the machine. Under every rule each request has
the same text. Controls know no entropy (`by lot`, `round robin`, `least attained`), or give the entropy rules the
entropies of another text. `srpt` knows every answer's length.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import clock, priority
from et_jax.control.base import ControlState, PriorityRule, Signals, chain
from et_jax.control.controller import Controller
from et_jax.control.smoothing import EmaEntropy
from et_jax.errors import UsageError
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace, value
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting

GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, spread evenly
ENTROPY = {"paper_linear": priority.LinearPriority(), "paper_ratio": priority.RatioPriority()}
RULES: dict[str, PriorityRule] = {
    "fcfs": priority.FCFS(),
    "by lot": lambda signals, state: signals.arrival.astype(state.priority.dtype) * GOLDEN % 1.0,
    "round robin": priority.Aged(lambda signals, state: jnp.zeros_like(state.priority), 0.0, 1.0),
    "least attained": priority.LeastAttained(),
    "srpt": priority.SRPT(),
    **ENTROPY,
    **{f"{name}, of another": rule for name, rule in ENTROPY.items()},
}


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    trace: Path = setting(..., "recorded arrivals, gzipped JSON lines", kind="text")
    text: Path = experiment.text()
    requests: int = setting(120, "requests of the trace", least=2, quick=6)
    loads: tuple[float, ...] = setting((1.5, 4.0), "tokens asked for per token served", least=0.01, quick=(4.0,))
    batch: int = setting(8, "sequences that a step serves", least=2, quick=2)
    prompt: int = setting(256, "tokens of the longest prompt", least=2, quick=16)
    answer: int = setting(200, "tokens of the longest answer", least=1, quick=12)
    rules: tuple[str, ...] = setting(
        tuple(RULES), "rules", choices=tuple(RULES), quick=("fcfs", "srpt", "paper_linear", "paper_linear, of another")
    )


@value
class Told(priority.EntropyDrift):
    """The law shown `entropies`, in nats, one after another, in place of the raw entropy."""

    entropies: Float[Array, " t"] = field(kw_only=True)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Let the law decide by what it is shown; a longer text is shown the last entropy again."""
        shown = self.entropies[jnp.clip(signals.generated - 1, 0, len(self.entropies) - 1)]
        return super().__call__(replace(signals, entropy=shown), state)


def recorded(path: Path, count: int) -> Float[np.ndarray, "3 n"]:
    """Return the tokens of prompts and of answers, and the times, of the first requests of a trace."""
    try:
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
        names = ("input_length", "output_length", "timestamp")
        found = np.array([[row[name] for row in rows] for name in names], float)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"The trace {path} cannot be read ({error}); give a gzipped file of JSON lines.") from error
    if found.shape[1] < count:
        raise UsageError(f"The trace {path} has {found.shape[1]} requests and {count} were asked for; ask for fewer.")
    return found


def replay(
    model: Model,
    rule: PriorityRule,
    asked: list[GenerationRequest],
    shown: list[np.ndarray] | None,
    arrived: np.ndarray,
) -> dict[str, Any]:
    """Serve the requests under a rule; return each one's steps until its first token and its last, and the speed."""
    longest = max(one.params.max_tokens for one in asked)
    drift = [priority.EntropyDrift()] * len(asked)
    if shown is not None:
        drift = [Told(entropies=jnp.asarray(np.resize(one, longest), jnp.float32)) for one in shown]
    controls = [Controller(law=chain(EmaEntropy(), clock.FallClock(), one), priority=rule) for one in drift]
    [replica] = model.replicas(controls[0]).replicas
    replica.bursts.burst_seconds = 0.0  # one step a round, so that arrivals fall between any two
    now, first, last = 0.0, np.full(len(asked), np.nan), np.full(len(asked), np.nan)

    def deliver(index: int) -> Callable[[Any], None]:
        def take(event: Any) -> None:
            if event.trace is not None and np.isnan(first[index]):
                first[index] = now
            if event.completion is not None:
                last[index] = now

        return take

    coming = list(range(len(asked)))
    while coming or not replica.idle:
        if replica.idle and arrived[coming[0]] > now:
            now = float(arrived[coming[0]])
        while coming and arrived[coming[0]] <= now:
            index = coming.pop(0)
            [sequence] = model.sequences(index, asked[index], controls[index])
            replica.queue.submit(sequence, deliver(index))
        before = model.metrics.steps
        now += 1.0
        replica.advance()
        now += model.metrics.steps - before - 1.0  # a round in which no sequence ran took no step
    tokens = sum(one.params.max_tokens for one in asked)
    return {"latency": last - arrived, "first_token": first - arrived, "tokens_per_step": tokens / now}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each load."""
    prompts, outputs, times = recorded(settings.trace, settings.requests)
    sizes = {"max_num_seqs": settings.batch, "max_resident_seqs": settings.requests}
    most = {"max_model_len": settings.prompt + settings.answer + 1, "max_num_batched_tokens": 2**20}
    served = load(settings.model, **sizes, **most)
    tokens = np.concatenate([served.tokenizer.encode(one) for one in text.texts(settings.text)])
    rng = np.random.default_rng(settings.seed)
    asked = []
    for number, (prompt, answer) in enumerate(zip(prompts / prompts.max(), outputs / outputs.max(), strict=True)):
        size, limit = max(2, round(prompt * settings.prompt)), max(1, round(answer * settings.answer))
        begin = int(rng.integers(len(tokens) - size))
        params = SamplingParams(max_tokens=limit, ignore_eos=True, seed=settings.seed + number)
        asked.append(GenerationRequest(prompt=tuple(tokens[begin : begin + size].tolist()), params=params))
    entropies = [np.array([row.entropy for row in done.trace]) for done in served.generate(asked)]
    lengths = sum(map(len, entropies))
    spread = (times - times[0]) / max(times[-1] - times[0], 1.0)

    def arm(name: str, load: float) -> dict[str, Any]:
        shown = entropies[-1:] + entropies[:-1] if name.endswith("of another") else None
        return replay(served, RULES[name], asked, shown, spread * lengths / (settings.batch * load))

    yield from grouped("load", settings.loads, settings.rules, arm, "fcfs")


FIGURES = {
    "latency": Figure(header="steps to the last token", against="saving"),
    "first_token": Figure(header="steps to the first token", against="saving"),
    "tokens_per_step": Figure(header="tokens a step"),
}
