"""Does entropy serve requests in a better order? Priority rules under overload, in steps, on recorded arrivals.

    python scripts/measure_scheduling.py --trace conversation_trace.jsonl.gz [synthetic_trace.jsonl.gz]
        [--own MODEL stories.txt] [--load 1.5 4]

Lengths and arrivals are those of recorded traces (Mooncake, FAST'25), scaled down to the model: prompts and answers by
constant factors in each stretch of a trace, time so that requests bring `load` times the tokens that the steps can
produce while they arrive. With `--own` another model writes on from the beginnings of stories, arrivals are those of
the first trace, and an answer is as long as the model makes it. Loads after the first are tried on the first trace
alone. All requests that have come sit in the cache and every step serves the few of highest priority, so that the rule
alone decides; time is counted in steps, so that the figures do not depend on the machine. Under every rule each request
has the same text.

What shows whether entropy does it: rules that know none (`last come`; `by lot`, a rank that a request keeps; `round
robin`; `least attained`, fewest tokens first), and the entropy rules told the entropies of other texts, or their own in
another order. `srpt` knows every answer's length: an oracle. The longest wait under an aged rule is set against its
bound.
"""

import argparse
import dataclasses
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from et_jax.control import clock, priority
from et_jax.control.base import Law, PriorityRule, chain
from et_jax.control.controller import Controller
from et_jax.control.smoothing import EmaEntropy
from et_jax.errors import UsageError
from et_jax.evidence import misplaced, serving_tables
from et_jax.io.texts import read_text
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, write
from scripts.measuring.text import texts

TEXT = REPOSITORY / "README.md"
RATE = 0.01  # of aging: of the ceiling, per step waited
NATS_PER_BYTE = 1e-6  # ceiling of the rule that counts nats per byte: about a nat per step of the bundled model
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, spread evenly
BEGINNING = 64  # tokens of a story, at most, that a model goes on from
MEASURES = "mean_latency", "p50_latency", "mean_first_token", "nats_per_megabyte_at_half"  # that rules are compared by

Told = Callable[[Sequence[Float[np.ndarray, " _"]], np.random.Generator], list[Float[np.ndarray, " _"]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A priority rule to run; the ceiling and rate of its aging, if it ages; the wrong entropies it is told, if any."""

    name: str
    rule: PriorityRule
    aging: tuple[float, float] | None = None
    told: Told | None = None


def aged(name: str, rule: PriorityRule, ceiling: float, rate: float) -> Rule:
    """Return the rule, aged."""
    return Rule(name=name, rule=priority.Aged(rule, ceiling, rate), aging=(ceiling, rate))


ENTROPY = {"paper_linear": priority.LinearPriority(), "paper_ratio": priority.RatioPriority()}
WRONG = {"of other texts": misplaced.of_others, "in another order": misplaced.reordered}
RULES = (
    Rule(name="fcfs", rule=priority.FCFS()),
    Rule(name="last come", rule=lambda signals, state: signals.arrival.astype(state.priority.dtype)),
    Rule(name="by lot", rule=lambda signals, state: signals.arrival.astype(state.priority.dtype) * GOLDEN % 1.0),
    Rule(name="srpt (oracle)", rule=priority.SRPT()),
    aged("round robin", lambda signals, state: jnp.zeros_like(state.priority), 0.0, 1.0),
    Rule(name="least attained", rule=priority.LeastAttained()),
    *(Rule(name=name, rule=rule) for name, rule in ENTROPY.items()),
    *(
        Rule(name=f"{name}, entropies {which}", rule=rule, told=told)
        for name, rule in ENTROPY.items()
        for which, told in WRONG.items()
    ),
    aged("paper_linear, aged", ENTROPY["paper_linear"], 1.0, RATE),
    aged("paper_ratio, aged", ENTROPY["paper_ratio"], NATS_PER_BYTE, NATS_PER_BYTE * RATE),
)
COMPARED = (
    "fcfs",
    "last come",
    "by lot",
    "round robin",
    "least attained",
)  # with each entropy rule, and each told wrong entropies


def controller(rule: Rule, told: Float[np.ndarray, " t"]) -> Controller:
    """Return what serves under a rule; laws of the clock see the true entropies whatever the rule is told."""
    drift: Law = priority.EntropyDrift()
    if rule.told is not None:
        drift = misplaced.Told(drift, jnp.asarray(told, jnp.float32))
    return Controller(law=chain(EmaEntropy(), clock.FallClock(), drift), priority=rule.rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """Requests of a trace that follow each other: what is asked, when, from 0 to 1, and the answers' entropies, nats.

    Each may produce as many tokens as its answer has.
    """

    asked: list[GenerationRequest]
    time: Float[np.ndarray, " n"]
    entropies: list[Float[np.ndarray, " _"]]

    @property
    def lengths(self) -> Float[np.ndarray, " n"]:
        """Tokens of every answer."""
        return np.array([len(each) for each in self.entropies], float)

    def steps(self, load: float, batch: int) -> Float[np.ndarray, " n"]:
        """Return the step at which each comes: in all of them a batch could make 1 / load of the tokens."""
        return self.time * self.lengths.sum() / (batch * load)


def recorded(path: Path, first: int, count: int) -> Float[np.ndarray, "3 n"]:
    """Return the tokens of prompts and of answers, and the times, of `count` requests of a trace."""
    try:
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line, _ in zip(file, range(first + count), strict=False)][first:]
        found = np.array(
            [[row[name] for row in rows] for name in ("input_length", "output_length", "timestamp")], float
        )
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"The trace {path} cannot be read ({why}); give a gzipped file of JSON lines.") from error
    if len(rows) < count:
        raise UsageError(
            f"The trace {path} has {len(rows)} requests after the first {first}; {count} were asked for, ask for fewer."
        )
    return found


def scaled(lengths: Float[np.ndarray, " n"], longest: int, least: int) -> list[int]:
    """Return whole lengths in proportion, the longest of them `longest`."""
    return np.maximum(least, np.round(lengths * longest / lengths.max())).astype(int).tolist()


def stretch(
    model: Model, requests: Float[np.ndarray, "3 n"], longest: tuple[int, int], number: int, source: str | list[str]
) -> Stretch:
    """Return a stretch of a trace, answered once.

    Prompts are cut from a text, and answers are as long as the trace says; or prompts are the beginnings of stories,
    and answers end where the model ends them.
    """
    prompts, outputs, times = requests
    own, rng = not isinstance(source, str), np.random.default_rng(number)
    sizes, most = scaled(prompts, longest[0], 2), scaled(outputs, longest[1], 1)
    if isinstance(source, str):
        tokens = model.tokenizer.encode(source)
        starts = [int(rng.integers(len(tokens) - size)) for size in sizes]
        cut = [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    else:
        sizes, most = scaled(prompts, BEGINNING, 2), [longest[1]] * len(sizes)
        chosen = rng.choice(len(source), len(sizes), replace=False)
        cut = [model.tokenizer.encode(source[story])[:size] for story, size in zip(chosen, sizes, strict=True)]
    asked = [
        GenerationRequest(
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=tokens, ignore_eos=not own, seed=number * len(cut) + i),
        )
        for i, (prompt, tokens) in enumerate(zip(cut, most, strict=True))
    ]
    answers = model.generate(asked)
    ended = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, max_tokens=len(answer.token_ids)))
        for each, answer in zip(asked, answers, strict=True)
    ]
    entropies = [np.array([row.entropy for row in answer.trace]) for answer in answers]
    return Stretch(asked=ended, time=(times - times[0]) / max(times[-1] - times[0], 1.0), entropies=entropies)


def replay(model: Model, rule: Rule, stretch: Stretch, load: float, longest: int) -> dict[str, Any]:
    """Serve a stretch under one rule; return latencies in steps and the course of entropic time."""
    told = [np.zeros(1)] * len(stretch.asked)
    if rule.told is not None:
        told = [np.resize(each, longest) for each in rule.told(stretch.entropies, np.random.default_rng(1))]
    controls = [controller(rule, each) for each in told]
    [replica] = model.replicas(controls[0]).replicas
    replica.burst_seconds = 0.0  # one step a round, so that arrivals fall between any two
    batch, now = model.decoder_config.batch, 0.0
    arrived = stretch.steps(load, batch)
    first, last, times = np.full(len(arrived), np.nan), np.full(len(arrived), np.nan), {}
    course, ended, waits, runnable, resolved, spent = [], {}, 0, 0, 0.0, 0.0

    def deliver(index: int) -> Any:
        def take(event: Any) -> None:
            nonlocal resolved, spent
            if event.trace is not None:
                resolved += event.trace.entropic_time - times.get(index, 0.0)
                spent += event.trace.cost
                times[index] = event.trace.entropic_time
                first[index] = now if np.isnan(first[index]) else first[index]
            if event.completion is not None:
                last[index] = now
                ended[index] = event.completion

        return take

    coming = list(range(len(arrived)))
    while coming or not replica.idle:
        if replica.idle and arrived[coming[0]] > now:
            now = float(arrived[coming[0]])
        while coming and arrived[coming[0]] <= now:
            index = coming.pop(0)
            [sequence] = model.sequences(index, stretch.asked[index], controls[index])
            replica.queue.submit(sequence, deliver(index))
        before = model.metrics.steps
        now += 1.0
        replica.advance()
        now += model.metrics.steps - before - 1.0  # a round in which no sequence ran took no step
        waits = max(waits, int(np.asarray(replica.device.state.control.wait).max()))
        runnable = max(runnable, len(replica.slots))
        course.append((now, resolved, spent))
    for index, entropies in enumerate(stretch.entropies):
        if (found := len(ended[index].token_ids)) != len(entropies):
            raise RuntimeError(f"An answer of {len(entropies)} tokens has {found}. {ended[index].error or ''}")
    return {
        "latency": last - arrived,
        "first_token": first - arrived,
        "steps": now,
        "tokens": int(stretch.lengths.sum()),
        "longest_wait": waits,
        "bound": None if rule.aging is None else priority.waiting_bound(*rule.aging, runnable, batch),
        "course": course,
    }


def figures(results: list[dict[str, Any]], halves: list[float]) -> dict[str, Any]:
    """Return the figures of replays taken together; entropic time and cost are those at the given steps."""
    latency = np.concatenate([result["latency"] for result in results])
    at_half = [
        [point for point in result["course"] if point[0] <= half][-1]
        for result, half in zip(results, halves, strict=True)
    ]
    _, resolved, spent = np.sum(at_half, axis=0)
    bounds = [result["bound"] for result in results if result["bound"] is not None]
    return {
        "mean_latency": float(latency.mean()),
        "p50_latency": float(np.percentile(latency, 50)),
        "p99_latency": float(np.percentile(latency, 99)),
        "mean_first_token": float(np.mean([result["first_token"].mean() for result in results])),
        "tokens_per_step": sum(result["tokens"] for result in results) / sum(result["steps"] for result in results),
        "nats_at_half": float(resolved) / len(results),
        "nats_per_megabyte_at_half": float(resolved / spent) * 1e6,
        "longest_wait": max(result["longest_wait"] for result in results),
        "bound": min(bounds, default=None),
    }


def pairs() -> list[tuple[str, str]]:
    """Return the rules compared, and with what."""
    shared = [(name, "fcfs") for name in COMPARED[1:]]
    return shared + [
        (name, other) for name in ENTROPY for other in (*COMPARED, *(f"{name}, entropies {which}" for which in WRONG))
    ]


def case(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return figures of every rule over all stretches, and ratios of some, with the least and greatest of a stretch."""
    halves = [result["steps"] / 2 for result in results[RULES[0].name]]
    rows = {name: figures(found, halves) for name, found in results.items()}
    single = {
        name: [figures([one], [half]) for one, half in zip(found, halves, strict=True)]
        for name, found in results.items()
    }
    ratios = [
        {"rule": name, "over": other}
        | {
            measure: [
                rows[name][measure] / rows[other][measure],
                *(
                    extreme(a[measure] / b[measure] for a, b in zip(single[name], single[other], strict=True))
                    for extreme in (min, max)
                ),
            ]
            for measure in MEASURES
        }
        for name, other in pairs()
    ]
    return {"rows": [{"name": name} | row for name, row in rows.items()], "ratios": ratios}


def cases(model: Model, named: dict[str, Any], stretches: list[Stretch], loads: list[float], longest: int) -> list[Any]:
    """Return every load's figures on one model."""
    found: dict[float, dict[str, list[dict[str, Any]]]] = {each: {} for each in loads}
    for rule in RULES:  # those of one rule together, for they share a program
        for each in loads:
            found[each][rule.name] = [replay(model, rule, one, each, longest) for one in stretches]
    lengths = np.concatenate([one.lengths for one in stretches])
    spread = float(np.mean([one.lengths.std() / one.lengths.mean() for one in stretches]))
    about = named | {"mean_tokens": float(lengths.mean()), "variation": spread}
    return [about | {"load": each} | case(found[each]) for each in loads]


def main() -> None:
    parser = arguments.parser(__doc__, "model", results="scheduling.json")
    parser.add_argument("--trace", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, default=TEXT, help="where the prompts are cut from")
    parser.add_argument("--own", nargs=2, metavar=("MODEL", "STORIES"), help="a model that ends its texts itself")
    parser.add_argument("--requests", type=arguments.count(2), default=120, help="in a stretch of a trace")
    parser.add_argument("--stretches", type=arguments.count(), default=2)
    parser.add_argument("--load", type=float, nargs="+", default=[1.5, 4.0], help="tokens asked for per token served")
    parser.add_argument("--batch", type=arguments.count(), default=8, help="sequences a step serves")
    parser.add_argument(
        "--longest", type=arguments.count(), nargs=2, default=[256, 200], help="prompt and answer, in tokens"
    )
    args = parser.parse_args()
    runs = [(args.model, path, read_text(args.text, "The text")) for path in args.trace]
    if args.own:
        runs.append((args.own[0], args.trace[0], texts(Path(args.own[1]))))
    found, loaded = [], {}
    try:
        for name, path, source in runs:
            if name not in loaded:
                loaded = {name: load(name, **_sizes(args))}
            windows = [recorded(path, i * args.requests, args.requests) for i in range(args.stretches)]
            stretches = [stretch(loaded[name], one, args.longest, i, source) for i, one in enumerate(windows)]
            lengths = "the trace's" if isinstance(source, str) else "the model's own"
            named = {"model": Path(name).name, "trace": path.name, "lengths": lengths}
            loads = args.load[:1] if found else args.load
            found += cases(loaded[name], named, stretches, loads, args.longest[1])
            print(f"{serving_tables.scheduling(found[-len(loads) :])}\n", flush=True)
    except (UsageError, OSError) as error:
        sys.exit(str(error))
    names = ("requests", "stretches", "batch", "longest")
    write(args.output, "scripts/measure_scheduling.py", {name: getattr(args, name) for name in names}, cases=found)


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {
        "max_num_seqs": args.batch,
        "max_resident_seqs": args.requests,
        "max_model_len": sum(args.longest) + 1,
        "max_num_batched_tokens": 2**20,  # a prompt is read in the step in which it comes
    }


if __name__ == "__main__":
    main()
