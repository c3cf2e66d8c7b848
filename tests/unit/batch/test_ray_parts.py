"""What a job on Ray finds out by itself: shards and their outputs, room for actors; Ray itself is not needed."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in import PaperModel

from et_jax.batch.job import survey
from et_jax.batch.journal import open_journal
from et_jax.batch.ray import cluster
from et_jax.batch.ray.decoder import Decoder
from et_jax.batch.ray.folder import Sums, _lines, _record, _Row, shards
from et_jax.batch.tasks import Defaults, Entry, read_entries
from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig
from et_jax.serve.requests import SamplingParams


def test_files_of_a_folder_go_to_files_of_a_folder(tmp_path):
    inside, output = tmp_path / "in", tmp_path / "out"
    (inside / "deeper").mkdir(parents=True)
    for name in ("b.jsonl", "a.parquet", "_SUCCESS", ".hidden"):
        (inside / name).write_text("x")
    expected = {inside / "a.parquet": output / "a.parquet.jsonl", inside / "b.jsonl": output / "b.jsonl"}
    assert shards(str(inside), output) == expected
    assert shards(str(inside / "*.jsonl"), output) == {inside / "b.jsonl": output / "b.jsonl"}
    assert shards(str(inside / "a.parquet"), output) == {inside / "a.parquet": output}


@pytest.mark.parametrize(
    ("given", "expected", "platform"),
    [
        ({}, {"CPU": 1.0}, "cpu"),
        ({"CPU": 0, "GPU": 1}, {"GPU": 1.0}, "gpu"),
        ({"TPU": 4, "TPU-v5e-8-head": 1}, {"CPU": 1.0, "TPU": 4.0, "TPU-v5e-8-head": 1.0}, "tpu"),
        ({"GPU": 0}, {"CPU": 1.0}, "cpu"),
    ],
)
def test_resources_are_amounts_by_name(given, expected, platform):
    checked = cluster.check_resources(given)
    assert checked == expected
    assert cluster.platform_of(checked) == platform


def nodes(*held: dict[str, float]) -> Any:
    """A cluster of these nodes, and of one that is dead."""
    alive = [{"Alive": True, "Resources": one} for one in held]
    return SimpleNamespace(nodes=lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}])


@pytest.mark.parametrize(
    ("held", "resources", "room"),
    [
        ([{"CPU": 4.0}], {"CPU": 1.0}, 2),  # two are for the reading
        ([{"CPU": 3.0}] * 4, {"CPU": 2.0}, 4),  # an actor does not span nodes
        ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0}], {"CPU": 1.0, "GPU": 2.0}, 2),
        ([{"CPU": 32.0, "GPU": 1.0}, {"CPU": 32.0, "GPU": 1.0}], {"GPU": 2.0}, 0),
        ([], {"CPU": 1.0}, 0),
    ],
)
def test_there_is_room_for_so_many_actors_and_no_more(held, resources, room):
    found = nodes(*held)
    if room:
        cluster.check_room(found, room, resources)
    with pytest.raises(UsageError, match=f"there is room for {room}; ask for less, or start Ray with more"):
        cluster.check_room(found, room + 1, resources)


ROWS: list[dict[str, Any]] = [
    {"name": "text", "question": "It was"},
    {"name": "none"},
    {"name": "two", "question": "It was", "n": 2},
    {"name": "one", "question": "It was", "n": 1, "top_k": 4.0},
    {"name": "odds", "question": "It was", "logprobs": 2},
    {"name": "cold", "question": "It was", "temperature": -1.0},
    {"name": "long", "question": "a" * 101},
    {"name": "own", "question": "It was", "seed": 7, "control": {"tau": 0.5, "window": None}, "max_tokens": 3},
]


def test_rows_of_every_kind_have_a_text_or_a_reason(monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    context = SimpleNamespace(get_assigned_resources=dict)
    monkeypatch.setattr(cluster, "ray", lambda: SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(cluster, "settle", lambda _: None)
    defaults = Defaults(params=SamplingParams(max_tokens=5))
    decoder = Decoder(EngineConfig(), prompt="question", id="name", defaults=defaults, load=lambda _: PaperModel())

    def decoded(table: Any) -> list[dict[str, Any]]:
        async def all_of() -> list[Any]:
            return [row async for answered in decoder(table) for row in answered.to_pylist()]

        return asyncio.run(all_of())

    given = arrow.Table.from_pylist([dict.fromkeys(name for row in ROWS for name in row) | row for row in ROWS])
    found = {row["name"]: row for row in decoded(given)}
    texts = {name: len(row["text"]) for name, row in found.items() if row["text"] is not None}
    assert texts == {"text": 5, "one": 5, "own": 3}
    assert {name: row["error"] for name, row in found.items() if row["error"] is not None} == {
        "none": "none: prompt is missing; it must be a text that is not empty, or a list of token ids.",
        "two": "two: n has no place here, for a row has one text alone; rename or drop the column.",
        "odds": "odds: logprobs has no place here, for a row has one text alone; rename or drop the column.",
        "cold": "cold: temperature is -1.0; it must be 0 (greedy) or above.",
        "long": "long: The prompt is too long; shorten it.",
    }
    assert (found["own"]["seed"], found["text"]["seed"]) == (7, 0)
    figures = found["text"]["entropic"]
    assert (figures["cost_bytes"], figures["mean_entropy"]) == (50.0, 1.0)  # five tokens of 10 bytes and 1 nat
    [chat] = decoded(arrow.table({"question": [[{"role": "user", "content": "Hello"}]], "kept": [1]}))
    assert (len(chat["text"]), chat["kept"], chat["prompt_tokens"]) == (5, 1, len("user: Hello\n"))
    [tokens] = decoded(arrow.table({"question": [[73, 116]], "name": [5]}))
    assert (tokens["prompt_tokens"], tokens["name"], tokens["error"]) == (2, 5, None)


def test_what_has_a_row_is_not_read_again_and_a_changed_shard_is_a_fault(tmp_path):
    source, lines = tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": "It was"} for i in range(600)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_journal(tmp_path / "out.jsonl", {"model_files": "paper"}) as journal:
        entries = list(read_entries(source))
        for i in (0, 299, 598):
            journal.append({"id": entries[i].id, "custom_id": f"r{i}", "response": {}, "error": None})
        found = survey(source, journal)

    def read() -> list[dict[str, Any]]:
        shard = {"shard": 7, "source": str(source), "output": "out.jsonl", "column": None}
        shard |= {"marks": found.marks.tobytes(), "recorded": bytes(found.recorded)}
        tables = _lines(SimpleNamespace(to_pylist=lambda: [shard]))
        return [dict(zip(table, row, strict=True)) for table in tables for row in zip(*table.values(), strict=True)]

    rows = read()
    left = [entry for i, entry in enumerate(entries) if i not in (0, 299, 598)]
    assert [Entry(**json.loads(row["entry"])) for row in rows] == left
    assert {(row["fault"], row["shard"]) for row in rows} == {("", 7)}
    source.write_text(source.read_text().replace('"r500"', '"other"'))
    [fault] = [row["fault"] for row in read() if row["fault"]]
    assert fault.endswith("run the same command again when the file is as it should be.")


def test_a_fault_ends_the_job_and_a_row_is_written_once(tmp_path):
    sums = Sums(total=1)
    row = '{"id": "batch_req_1", "custom_id": "a", "response": {}, "error": null}'
    with open_journal(tmp_path / "out.jsonl", {"model_files": "paper"}) as journal:
        for _ in range(2):
            _record(_Row(row=row, tokens=3, nats=1.5, engine="e", rows=8, idle=1), [journal], sums)
        with pytest.raises(UsageError, match=r"the input was changed\."):
            _record(_Row(fault="the input was changed."), [journal], sums)
    assert (sums.answered, sums.tokens, sums.nats, sums.engines) == (1, 3, 1.5, {"e": (8, 1)})
    assert (tmp_path / "out.jsonl").read_text() == row + "\n"
