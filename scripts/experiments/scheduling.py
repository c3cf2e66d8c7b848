"""Does entropy serve requests in a better order, and what do order, attention and temperature bring together?

Lengths and arrivals are those of a recorded trace (Mooncake, FAST'25), scaled down to the model: prompts and answers by
constant factors, time so that requests bring `load` times the tokens that the steps can produce while they arrive. All
requests that have come are in the cache and every step serves the few of highest priority, so that the rule alone
decides. Time is counted in steps and in bytes that the steps move, so that the figures do not depend on the machine.

Under every order each request has the same text. Controls know no entropy (`by lot`, `round robin`, `least attained`),
or give the laws the entropies of another text. `srpt` knows every answer's length. Then the ablations of
Entropic-Time Inference, Table 1: `sampling`, `attention` and `paper`, which has all three; and `certified`, in order of
arrival. Their losses are those of the texts under dense attention.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import clock, priority, tolerance
from et_jax.control.base import ControlState, Law, PriorityRule, Signals, chain
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.smoothing import EmaEntropy
from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace, value
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting

GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, spread evenly
THETA = 0.05
OF_ANOTHER = ", of another"
BLOCKS = "blocks_held", "blocks_read"
ENTROPY = {"paper_linear": priority.LinearPriority(), "paper_ratio": priority.RatioPriority()}
RULES: dict[str, PriorityRule] = {
    "fcfs": priority.FCFS(),
    "by lot": lambda signals, state: signals.arrival.astype(state.priority.dtype) * GOLDEN % 1.0,
    "round robin": priority.Aged(lambda signals, state: jnp.zeros_like(state.priority), 0.0, 1.0),
    "least attained": priority.LeastAttained(),
    "srpt": priority.SRPT(),
    **ENTROPY,
}
TARGET = {"target_entropy": 2.0}  # nats
ATTENTION = replace(preset("paper", min_context=0), priority=priority.FCFS())
CONTROLS: dict[str, Controller] = {
    "sampling": replace(preset("paper", **TARGET), selector=Controller.selector, priority=priority.FCFS()),
    "attention": ATTENTION,
    "attention, constant theta": replace(ATTENTION, law=chain(Controller.law, tolerance.Constant(THETA))),
    "paper": preset("paper", **TARGET, min_context=0),
    "certified": replace(preset("certified", min_context=0), priority=priority.FCFS()),
}
BY_ENTROPY = (*ENTROPY, "attention", "paper")
ARMS = (*RULES, *CONTROLS, *(f"{name}{OF_ANOTHER}" for name in BY_ENTROPY))


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
        (*RULES, *(f"{name}{OF_ANOTHER}" for name in ENTROPY)),
        "orders and controls",
        choices=ARMS,
        quick=("fcfs", "srpt", "paper_linear, of another", "attention"),
    )


@value
class WithEntropies(Law):
    """A law that receives `entropies`, in nats, one for each token, in place of the raw entropy."""

    law: Law
    entropies: Float[Array, " t"]

    def init(self, state: ControlState) -> ControlState:
        """Return the state in which the law starts."""
        return self.law.init(state)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Apply the law with the entropy of this token; beyond the last one the last is repeated."""
        shown = self.entropies[jnp.clip(signals.generated - 1, 0, len(self.entropies) - 1)]
        return self.law(replace(signals, entropy=shown), state)


def controller(name: str) -> Controller:
    """Return the controller of an arm, by its name without `OF_ANOTHER`."""
    law = chain(EmaEntropy(), clock.FallClock(), priority.EntropyDrift())
    return CONTROLS[name] if name in CONTROLS else Controller(law=law, priority=RULES[name])


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
    control: Controller,
    asked: list[GenerationRequest],
    shown: list[np.ndarray] | None,
    arrived: np.ndarray,
) -> tuple[dict[str, Any], list[Completion]]:
    """Serve the requests under a control, whose laws receive the entropies `shown` if given.

    Returns each one's steps to its first token, its steps and bytes to its last, the speed, and the completions.
    """
    longest = max(one.params.max_tokens for one in asked)
    controls = [control] * len(asked)
    if shown is not None:
        others = (jnp.asarray(np.resize(one, longest), jnp.float32) for one in shown)
        controls = [replace(control, law=WithEntropies(control.law, one)) for one in others]
    [replica] = model.replicas(controls[0]).replicas
    replica.bursts.burst_seconds = 0.0  # one step a round, so that arrivals fall between any two
    now, first, last = 0.0, np.full(len(asked), np.nan), np.full(len(asked), np.nan)
    times, moved, bytes_moved = [0.0], [0.0], 0.0
    done: dict[int, Completion] = {}

    def deliver(index: int) -> Callable[[Any], None]:
        def take(event: Any) -> None:
            nonlocal bytes_moved
            if event.trace is not None:
                bytes_moved += event.trace.cost
                if np.isnan(first[index]):
                    first[index] = now
            if event.completion is not None:
                last[index], done[index] = now, event.completion

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
        times.append(now)
        moved.append(bytes_moved)
    tokens = sum(one.params.max_tokens for one in asked)
    begun, ended = (np.interp(one, times, moved) for one in (arrived, last))
    found = {"latency": last - arrived, "latency_bytes": (ended - begun) / 1e9, "first_token": first - arrived}
    speed = {"tokens_per_step": tokens / now, "tokens_per_gigabyte": 1e9 * tokens / bytes_moved}
    return found | speed, [done[index] for index in range(len(asked))]


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

    known: dict[tuple[tuple[int, ...], ...], tuple[np.ndarray, float]] = {}

    def under_dense(texts: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, float]:
        """Return each answer's mean loss and the falls of entropy of all; arms with the same answers share them."""
        if texts not in known:
            scores = served.score([(*one.prompt, *text) for one, text in zip(asked, texts, strict=True)])
            ends = [
                (one.log_probs[-len(text) :], one.entropy[-len(text) :])
                for one, text in zip(scores, texts, strict=True)
            ]
            falls = sum(float(np.maximum(-np.diff(entropy), 0.0).sum()) for _, entropy in ends)
            known[texts] = np.array([-float(np.mean(log_probs)) for log_probs, _ in ends]), falls
        return known[texts]

    def arm(name: str, load: float) -> dict[str, Any]:
        shown = entropies[-1:] + entropies[:-1] if name.endswith(OF_ANOTHER) else None
        control = controller(name.removesuffix(OF_ANOTHER))
        found, done = replay(served, control, asked, shown, spread * lengths / (settings.batch * load))
        held, read = (np.array([sum(getattr(row, key) for row in one.trace) for one in done]) for key in BLOCKS)
        loss, falls = under_dense(tuple(tuple(one.token_ids) for one in done))
        nats = falls * found["tokens_per_gigabyte"] / lengths
        return found | {"nats_per_gigabyte": nats, "share_read": read / held, "loss": loss}

    yield from grouped("load", settings.loads, settings.rules, arm, "fcfs")


FIGURES = {
    "latency": Figure(header="steps to the last token", against="saving"),
    "latency_bytes": Figure(header="GB to the last token", against="saving"),
    "first_token": Figure(header="steps to the first token", against="saving"),
    "tokens_per_step": Figure(header="tokens a step"),
    "tokens_per_gigabyte": Figure(header="tokens/GB"),
    "nats_per_gigabyte": Figure(header="falls of entropy, nats/GB"),
    "share_read": Figure(header="blocks read"),
    "loss": Figure(header="loss of the answers, nats", against="difference"),
}
