"""What Ray costs by line: two actors beside one process with two replicas and beside one process; and Ray alone.

    python scripts/bench_ray.py [--rounds 3] [--lines 5400] [--short-lines 100000]

The same lines are decoded by the bundled model in three ways, by turns: by one process, by one process with two
replicas, and by two actors of Ray with a core each. Tokens a second are those of the time in which the way is under
way: from when the programs are compiled, of actors from when each has answered a block, to the last answer. What
starting adds is told apart. Every text of the actors must be the one of the process, else the script ends with a
sentence and exit code 1.

Then as many short lines as asked for go through `map_batches` with a model that answers at once: lines a second from
the first block to the last, and the memory of this process after every tenth of them. Needs the extra ray.
"""

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import et_jax
from et_jax.batch.ray import Decoder
from et_jax.batch.ray.cluster import ray
from et_jax.batch.ray.decoder import in_actors
from et_jax.batch.ray.folder import LineDecoder
from et_jax.batch.tasks import Defaults, Entry
from et_jax.serve.completions import Completion
from et_jax.serve.config import EngineConfig
from et_jax.serve.metrics import Metrics
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import arguments
from scripts.measuring.results import RESULTS, table, write

WAYS = ("one process", "two replicas", "two actors")
LENGTH = 256
BATCH = 1000  # of short lines
DEFAULTS = Defaults(params=SamplingParams())


def entries(count: int) -> list[Entry]:
    """Return plain lines of 16 to 48 tokens, each with a seed of its own."""
    return [
        Entry(
            line=i,
            custom_id=f"r{i}",
            id=f"r{i}",
            values={"prompt": f"It was the {i}th", "max_tokens": 16 + i * 7 % 33, "seed": i},
        )
        for i in range(count)
    ]


def in_process(asked: list[Entry], replicas: int) -> tuple[dict[str, str], dict[str, float]]:
    """Return the text of every line by one process, and its figures."""
    began = time.monotonic()
    with et_jax.load(max_model_len=LENGTH, replicas=replicas) as model:
        model.warm_up()
        ready = time.monotonic()
        requests = [
            GenerationRequest(
                prompt=entry.values["prompt"],
                params=SamplingParams(max_tokens=entry.values["max_tokens"], seed=entry.values["seed"]),
            )
            for entry in asked
        ]
        texts, tokens = {}, 0
        for index, completion in model.as_completed(requests):
            texts[asked[index].id] = completion.text
            tokens += len(completion.token_ids)
        seconds = time.monotonic() - ready
        idle = model.metrics.idle_rows / model.metrics.step_rows
    return texts, {"tokens_per_second": tokens / seconds, "seconds_before": ready - began, "idle_share": idle}


def by_actors(asked: list[Entry], actors: int) -> tuple[dict[str, str], dict[str, float]]:
    """Return the text of every line by actors, and their figures; beginning when each has answered a block."""
    began = time.monotonic()
    lines = [{"fault": "", "shard": 0, "entry": json.dumps(dataclasses.asdict(entry))} for entry in asked]
    config = EngineConfig(max_model_len=LENGTH)
    given = {"config": config, "defaults": DEFAULTS}
    dataset = in_actors(ray().data.from_items(lines), LineDecoder, given, config, actors, {"CPU": 1.0})
    texts, engines, tokens, since = {}, {}, 0, None
    for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for row in block.to_pylist():
            answer = json.loads(row["row"])
            texts[answer["custom_id"]] = answer["response"]["body"]["choices"][0]["text"]
            engines[row["engine"]] = max(engines.get(row["engine"], (0, 0)), (row["rows"], row["idle"]))
            tokens += row["tokens"] if since is not None else 0
        if since is None and len(engines) == actors:
            since = time.monotonic()
    if since is None:
        sys.exit(f"Only {len(engines)} of {actors} actors had a block; ask for more --lines.")
    rows, idle = (sum(each) for each in zip(*engines.values(), strict=True))
    seconds = time.monotonic() - since
    return texts, {"tokens_per_second": tokens / seconds, "seconds_before": since - began, "idle_share": idle / rows}


class Instant:
    """A model that answers every prompt with one token, at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.name, self.tokenizer, self.metrics = "instant", SimpleNamespace(chat_template=None), Metrics()

    def as_completed(self, requests: Iterable[GenerationRequest], **_: Any) -> Iterator[tuple[int, Completion]]:
        for index, request in enumerate(requests):
            fields = {"index": 0, "text": "x", "token_ids": (1,), "finish_reason": "length", "error": None}
            yield index, Completion(prompt=request.prompt, prompt_tokens=1, trace=(), **fields)


def memory() -> float:
    """Return the megabytes that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def short_lines(count: int) -> dict[str, Any]:
    """Return lines a second of `count` short ones through actors that answer at once, and this process's memory."""
    module = ray()

    def prompts(batch: dict[str, Any]) -> dict[str, Any]:
        names = [str(number) for number in batch["id"]]
        return {"custom_id": names, "prompt": [f"It was {name}" for name in names]}

    blocks = max(1, count // BATCH)
    answered = (
        module.data.range(count, override_num_blocks=blocks)
        .map_batches(prompts)
        .map_batches(
            Decoder,
            batch_size=BATCH,
            batch_format="pyarrow",
            fn_constructor_kwargs={"config": EngineConfig(), "defaults": DEFAULTS, "load": Instant},
            compute=module.data.ActorPoolStrategy(size=2),
        )
    )
    done, seen, first, held = 0, set(), None, []
    for block in answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        if first is None:
            first, begun = time.monotonic(), block.num_rows
        done += block.num_rows
        seen.update(block["custom_id"].to_pylist())
        if done * 10 // count > len(held):
            held.append(round(memory(), 1))
    if first is None or done != count or len(seen) != count:
        sys.exit(f"{done} rows of {len(seen)} names came of {count} lines.")
    rate = (done - begun) / (time.monotonic() - first)
    return {"lines": count, "lines_per_second": round(rate, 1), "driver_megabytes": held}


def measured(asked: list[Entry], rounds: int) -> list[dict[str, Any]]:
    """Return the figures of every way and round, each round in another order."""
    run = {
        "one process": lambda: in_process(asked, 1),
        "two replicas": lambda: in_process(asked, 2),
        "two actors": lambda: by_actors(asked, 2),
    }
    found, expected = [], None
    for number in range(rounds):
        for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
            texts, figures = run[way]()
            expected = expected or texts
            if texts != expected:
                sys.exit(f"{way}: {sum(texts.get(name) != expected[name] for name in expected)} texts differ.")
            found.append({"round": number, "way": way} | figures)
            print(found[-1], file=sys.stderr, flush=True)
    return found


def summary(found: list[dict[str, Any]], lines: int, tokens: int) -> dict[str, Any]:
    """Return medians by way, and what a pair of ways comes to in the same round."""
    by_way = {way: [one for one in found if one["way"] == way] for way in WAYS}
    medians = {
        way: {
            name: statistics.median(one[name] for one in ones)
            for name in ("tokens_per_second", "seconds_before", "idle_share")
        }
        for way, ones in by_way.items()
    }

    def paired(baseline: str) -> dict[str, float]:
        pairs = [
            (one["tokens_per_second"], other["tokens_per_second"])
            for one, other in zip(by_way["two actors"], by_way[baseline], strict=True)
        ]
        cost = statistics.median(1e3 * tokens / lines * (1 / ours - 1 / other) for ours, other in pairs)
        return {
            "least_ratio": min(ours / other for ours, other in pairs),
            "median_ratio": statistics.median(ours / other for ours, other in pairs),
            "most_ratio": max(ours / other for ours, other in pairs),
            "milliseconds_more_a_line": cost,
        }

    return {"ways": medians, "two_actors_over": {way: paired(way) for way in WAYS[:2]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=arguments.count(), default=3)
    parser.add_argument("--lines", type=arguments.count(), default=5400)
    parser.add_argument("--short-lines", type=arguments.count(), default=100_000)
    parser.add_argument("--output", type=arguments.output, default=RESULTS / "ray.json")
    args = parser.parse_args()
    module = ray()
    module.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    asked = entries(args.lines)
    load, began = os.getloadavg()[0], time.monotonic()
    rounds = measured(asked, args.rounds)
    tokens = sum(entry.values["max_tokens"] for entry in asked)
    found: dict[str, Any] = (
        {"rounds": rounds} | summary(rounds, args.lines, tokens) | {"short_lines": short_lines(args.short_lines)}
    )
    note = {"load_average_before": round(load, 2), "seconds": round(time.monotonic() - began, 1)}
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    write(args.output, "scripts/bench_ray.py", settings, ray=module.__version__, **note, **found)
    print(
        table(
            ["way", "tokens/s", "idle slots"],
            [[way, found["ways"][way]["tokens_per_second"], found["ways"][way]["idle_share"]] for way in WAYS],
        )
    )
    print(json.dumps(found["two_actors_over"], indent=1), json.dumps(found["short_lines"]), sep="\n")
    module.shutdown()


if __name__ == "__main__":
    main()
