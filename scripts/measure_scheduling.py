"""Does entropy serve requests in a better order? Priority rules under overload, in steps, on recorded arrivals.

    python scripts/measure_scheduling.py --trace conversation_trace.jsonl.gz [--load 2 4]

Lengths and arrivals are those of a recorded trace (Mooncake, FAST'25), scaled down to the model: prompts and answers by
constant factors, time so that requests bring `load` times the tokens that the steps can produce while they arrive. All
requests that have come sit in the cache and every step serves the few of highest priority, so that the rule alone
decides; time is counted in steps, so that the figures do not depend on the machine. `srpt` knows every answer's length:
an oracle. Under every rule each request has the same text. The aged rules' longest wait is set against its bound.
"""

import argparse
import dataclasses
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.control import clock, priority
from et_jax.control.base import PriorityRule, chain
from et_jax.control.controller import Controller
from et_jax.control.smoothing import EmaEntropy
from et_jax.errors import UsageError
from et_jax.evidence import arguments, tables
from et_jax.evidence.results import REPOSITORY, RESULTS, write
from et_jax.io.texts import read_text
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams

TEXT = REPOSITORY / "README.md"
CEILING, RATE = 1.0, 0.01  # of aging: nats, and nats per step waited
NATS_PER_BYTE = 1e-6  # ceiling of the rule that counts nats per byte: about a nat per step of the bundled model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A priority rule to run, and the ceiling and rate of its aging, None where it does not age."""

    name: str
    rule: PriorityRule
    aging: tuple[float, float] | None = None


def rules() -> list[Rule]:
    """Return the rules compared."""
    aged = [
        ("paper_linear, aged", priority.LinearPriority(), CEILING),
        ("paper_ratio, aged", priority.RatioPriority(), NATS_PER_BYTE),
    ]
    return [
        Rule(name="fcfs", rule=priority.FCFS()),
        Rule(name="srpt (oracle)", rule=priority.SRPT()),
        Rule(name="paper_linear", rule=priority.LinearPriority()),
        Rule(name="paper_ratio", rule=priority.RatioPriority()),
        *(
            Rule(name=name, rule=priority.Aged(rule, ceiling, ceiling * RATE), aging=(ceiling, ceiling * RATE))
            for name, rule, ceiling in aged
        ),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of the trace, scaled: when it comes, in steps, its prompt and the tokens it wants."""

    step: float
    prompt: int
    output: int


def arrivals(path: Path, count: int, longest: tuple[int, int], load: float, batch: int) -> list[Arrival]:
    """Return the first `count` requests of a trace, their longest prompt and answer cut to size in proportion."""
    names = "input_length", "output_length", "timestamp"
    try:
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
        prompts, outputs, times = (np.array([row[name] for row in rows], float) for name in names)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"The trace {path} cannot be read ({why}); give a gzipped file of JSON lines.") from error
    if not rows:
        raise UsageError(f"The trace {path} is empty; give a gzipped file of JSON lines.")
    prompts = np.maximum(2, np.round(prompts * longest[0] / prompts.max())).astype(int)
    outputs = np.maximum(1, np.round(outputs * longest[1] / outputs.max())).astype(int)
    duration = outputs.sum() / (batch * load)  # steps in which the batch could make 1 / load of the tokens
    steps = (times - times[0]) / max(times[-1] - times[0], 1.0) * duration
    return [
        Arrival(step=float(s), prompt=int(p), output=int(o)) for s, p, o in zip(steps, prompts, outputs, strict=True)
    ]


def requests(model: Model, trace: list[Arrival], text: str) -> list[GenerationRequest]:
    """Return a request for every arrival, its prompt cut from a text."""
    tokens, rng = model.tokenizer.encode(text), np.random.default_rng(0)
    starts = [int(rng.integers(len(tokens) - arrival.prompt)) for arrival in trace]
    return [
        GenerationRequest(
            prompt=tuple(tokens[start : start + arrival.prompt]),
            params=SamplingParams(max_tokens=arrival.output, ignore_eos=True, seed=number),
        )
        for number, (start, arrival) in enumerate(zip(starts, trace, strict=True))
    ]


def replay(model: Model, rule: Rule, trace: list[Arrival], asked: list[GenerationRequest]) -> dict[str, Any]:
    """Serve the trace under one rule; return latencies in steps and the course of entropic time."""
    law = chain(EmaEntropy(), clock.FallClock(), priority.EntropyDrift())
    [replica] = model.replicas(Controller(law=law, priority=rule.rule)).replicas
    replica.burst_seconds = 0.0  # one step a round, so that arrivals fall between any two
    now = 0.0
    first, last, texts = np.full(len(trace), np.nan), np.full(len(trace), np.nan), {}
    course, waits, runnable, resolved, spent = [], 0, 0, 0.0, 0.0

    def deliver(index: int) -> Any:
        def take(event: Any) -> None:
            nonlocal resolved, spent
            if event.trace is not None:
                resolved += event.trace.entropic_time - texts.get(index, 0.0)
                spent += event.trace.cost
                texts[index] = event.trace.entropic_time
                first[index] = now if np.isnan(first[index]) else first[index]
            if event.completion is not None:
                last[index] = now

        return take

    coming = list(enumerate(trace))
    while coming or not replica.idle:
        if replica.idle and coming[0][1].step > now:
            now = coming[0][1].step
        while coming and coming[0][1].step <= now:
            index, _ = coming.pop(0)
            [sequence] = model.sequences(index, asked[index])
            replica.queue.submit(sequence, deliver(index))
        before = model.metrics.steps
        now += 1.0
        replica.advance()
        now += model.metrics.steps - before - 1.0  # a round in which no sequence ran took no step
        waits = max(waits, int(np.asarray(replica.device.state.control.wait).max()))
        runnable = max(runnable, len(replica.slots))
        course.append((now, resolved, spent))
    arrived = np.array([arrival.step for arrival in trace])
    return {
        "name": rule.name,
        "latency": (last - arrived).tolist(),
        "first_token": (first - arrived).tolist(),
        "steps": now,
        "tokens": sum(arrival.output for arrival in trace),
        "longest_wait": waits,
        "bound": None
        if rule.aging is None
        else priority.waiting_bound(*rule.aging, runnable, model.decoder_config.batch),
        "course": course,
    }


def figures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each rule; entropic time and cost are those at the step half-way through the first."""
    half = results[0]["steps"] / 2
    rows = []
    for result in results:
        latency, first = np.array(result["latency"]), np.array(result["first_token"])
        _, resolved, spent = [point for point in result["course"] if point[0] <= half][-1]
        rows.append(
            {
                "name": result["name"],
                "mean_latency": float(latency.mean()),
                "p50_latency": float(np.percentile(latency, 50)),
                "p99_latency": float(np.percentile(latency, 99)),
                "mean_first_token": float(first.mean()),
                "tokens_per_step": result["tokens"] / result["steps"],
                "nats_at_half": resolved,
                "nats_per_megabyte_at_half": resolved / spent * 1e6,
                "longest_wait": result["longest_wait"],
                "bound": result["bound"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=TEXT, help="where the prompts are cut from")
    parser.add_argument("--requests", type=arguments.count(), default=120)
    parser.add_argument("--load", type=float, nargs="+", default=[1.5, 4.0], help="tokens asked for per token served")
    parser.add_argument("--batch", type=arguments.count(), default=8, help="sequences a step serves")
    parser.add_argument(
        "--longest", type=arguments.count(), nargs=2, default=[256, 200], help="prompt and answer, in tokens"
    )
    parser.add_argument("--output", type=arguments.output, default=RESULTS / "scheduling.json")
    args = parser.parse_args()
    try:
        model = load(
            args.model,
            max_num_seqs=args.batch,
            max_resident_seqs=args.requests,
            max_model_len=sum(args.longest) + 1,
            max_num_batched_tokens=2**20,  # a prompt is read in the step in which it comes
        )
        cases = []
        for share in args.load:
            trace = arrivals(args.trace, args.requests, tuple(args.longest), share, args.batch)
            asked = requests(model, trace, read_text(args.text, "The text"))
            rows = figures([replay(model, rule, trace, asked) for rule in rules()])
            cases.append({"load": share, "rows": rows})
            print(f"{tables.scheduling(cases[-1:])}\n")
    except (UsageError, OSError) as error:
        sys.exit(str(error))
    settings = {name: getattr(value, "name", value) for name, value in vars(args).items() if name != "output"}
    write(args.output, "scripts/measure_scheduling.py", settings, cases=cases)


if __name__ == "__main__":
    main()
