"""What Ray costs by line: two actors beside one process, and beside one process with two replicas.

The same lines are decoded by the bundled model in three ways, each round anew. Tokens a second are those of the time
from when the programs are compiled, of actors from when each has answered a block, to the last answer; the time before
is shown apart. Every text of the actors must be that of the process. Needs the extra ray.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import et_jax
from et_jax.batch.ray.cluster import ray
from et_jax.batch.ray.decoder import in_actors
from et_jax.batch.ray.folder import LineDecoder
from et_jax.batch.tasks import Defaults, Entry
from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.timing import Round

LENGTH = 256
Found = tuple[dict[str, str], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    lines: int = setting(5400, "lines of 16 to 48 tokens", least=2, quick=64)
    rounds: int = setting(3, "rounds in which the ways take turns", least=2, quick=2)


def entries(count: int) -> list[Entry]:
    """Return plain lines, each with a seed of its own."""

    def entry(i: int) -> Entry:
        values = {"prompt": f"It was the {i}th", "max_tokens": 16 + i * 7 % 33, "seed": i}
        return Entry(line=i, custom_id=f"r{i}", id=f"r{i}", values=values)

    return [entry(i) for i in range(count)]


def in_process(asked: list[Entry], replicas: int) -> Found:
    """Return the text of every line by one process, and its figures."""
    began = time.monotonic()
    with et_jax.load(max_model_len=LENGTH, replicas=replicas) as model:
        model.warm_up()
        ready, texts, tokens, requests = time.monotonic(), {}, 0, []
        for values in (entry.values for entry in asked):
            params = SamplingParams(max_tokens=values["max_tokens"], seed=values["seed"])
            requests.append(GenerationRequest(prompt=values["prompt"], params=params))
        for index, completion in model.as_completed(requests):
            texts[asked[index].id] = completion.text
            tokens += len(completion.token_ids)
        rate = tokens / (time.monotonic() - ready)
        idle = model.metrics.idle_rows / model.metrics.step_rows
    return texts, {"tokens_per_second": rate, "seconds_before": ready - began, "idle_share": idle}


def by_actors(asked: list[Entry], actors: int) -> Found:
    """Return the text of every line by actors, and their figures; beginning when each has answered a block."""
    began, config = time.monotonic(), EngineConfig(max_model_len=LENGTH)
    lines = [{"fault": "", "shard": 0, "entry": json.dumps(dataclasses.asdict(entry))} for entry in asked]
    given = {"config": config, "defaults": Defaults(params=SamplingParams())}
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
    if since is None or tokens == 0:
        raise UsageError(f"Only {len(engines)} of {actors} actors had a block in time; give more --lines.")
    rows, idle = (sum(each) for each in zip(*engines.values(), strict=True))
    rate = tokens / (time.monotonic() - since)
    return texts, {"tokens_per_second": rate, "seconds_before": since - began, "idle_share": idle / rows}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group."""
    how = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray().init(address="local", num_cpus=4, **how)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    asked, expected = entries(settings.lines), {}
    ways = {
        "one process": partial(in_process, asked, 1),
        "two replicas": partial(in_process, asked, 2),
        "two actors": partial(by_actors, asked, 2),
    }

    def started(name: str) -> Round:
        def timed() -> dict[str, float]:
            texts, figures = ways[name]()
            if texts != (expected or texts):
                raise UsageError(f"{name}: {sum(texts.get(one) != expected[one] for one in expected)} texts differ.")
            expected.update(texts)
            return figures

        return timed

    arms = {name: partial(started, name) for name in ways}
    yield Group(arms=arms, baseline="two replicas", rounds=settings.rounds)
    ray().shutdown()


EXPERIMENT = Experiment(
    question="What does Ray cost by line: two actors beside one process, and beside one with two replicas?",
    settings=Settings,
    groups=groups,
    figures={
        "tokens_per_second": Figure(header="tokens a second", against="ratio"),
        "seconds_before": Figure(header="seconds before"),
        "idle_share": Figure(header="idle slots"),
    },
    timed=True,
)
