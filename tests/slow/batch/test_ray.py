"""Batch files and datasets on Ray: whoever is killed, every id is answered once, with the text of a plain run."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from et_jax.batch.ray import decode
from et_jax.errors import UsageError
from et_jax.generate import main
from et_jax.serve.config import EngineConfig

pytestmark = pytest.mark.usefixtures("hardly_optimised")
ray: Any = pytest.importorskip("ray", reason="needs the extra ray")

PATIENCE = 240.0
SHARDS, LINES = 3, 60
LENGTH = ("--max-model-len", "128")


@pytest.fixture(scope="module")
def cluster(hardly_optimised: None) -> Iterator[str]:
    """Start Ray in this process, for commands to join; return its address."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=4, **quiet)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def lines(shard: int) -> list[dict[str, Any]]:
    """Return mixed lines; two are refused, one by the engine."""

    def line(i: int) -> dict[str, Any]:
        made: dict[str, Any] = {"id": f"s{shard}-{i}", "prompt": f"It was the {i}th of {shard}"}
        made |= {"max_tokens": 4 + 3 * (i % 9), "seed": i}
        if i % 4 == 1:
            made |= {"temperature": 0.7, "top_p": 0.9}
        if i % 10 == 2:
            made |= {"n": 2, "stop": ["."]}
        if i % 25 == 24:
            made |= {"prompt": "long " * 200} if i == 24 else {"temperature": "warm"}
        return made

    return [line(i) for i in range(LINES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards, two of JSON lines and one of Parquet."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS - 1):
        (path / f"s{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(shard)))
    last = [{name: value for name, value in line.items() if value != "warm"} for line in lines(SHARDS - 1)]
    parquet.write_table(arrow.Table.from_pylist(last), path / f"s{SHARDS - 1}.parquet")
    return path


def rows(*outputs: Path) -> dict[str, Any]:
    """Return what no kill may change of every row, by its name; a name that comes twice fails."""
    found: dict[str, Any] = {}
    for text in b"".join(output.read_bytes() for output in outputs).splitlines():
        row = json.loads(text)
        assert row["custom_id"] not in found
        body = None if row["response"] is None else row["response"]["body"]
        found[row["custom_id"]] = row["id"], body and (body["choices"], body["usage"]), row["error"]
    return found


def outputs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl")) if folder.exists() else []


def num_rows(folder: Path) -> int:
    return sum(output.read_bytes().count(b"\n") for output in outputs(folder))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the rows of plain runs, one for each shard."""
    path = tmp_path_factory.mktemp("plain")
    made = []
    for source in sorted(folder.iterdir()):
        made.append(path / f"{source.name}.out.jsonl")
        assert main(["-i", str(source), "-o", str(made[-1]), *LENGTH]) == 0
    found = rows(*made)
    assert len(found) == LINES * SHARDS
    return found


def start(source: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "et_jax.generate", "-i", str(source), "-o", str(output), "--ray", *LENGTH, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, said
    return said


def engines(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the actors on the cluster that a command started."""
    below = {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
    names = {one.pid: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
    return [pid for pid in below & names.keys() if "MapWorker" in names[pid]]


def amid(process: subprocess.Popen[str], output: Path, count: int) -> None:
    """Wait until a command has written so many rows, and is not done."""
    deadline = time.monotonic() + PATIENCE
    while num_rows(output) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None and num_rows(output) < LINES * SHARDS


def test_an_actor_and_then_the_driver_are_killed_amid_the_work(folder, plain, tmp_path, cluster):
    output = tmp_path / "out"
    process = start(folder, output, "--ray-actors", "2")  # on a cluster of its own
    amid(process, output, 12)
    first, _ = engines(process)
    os.kill(first, signal.SIGKILL)
    while first in engines(process):
        time.sleep(0.01)
    amid(process, output, num_rows(output) + 12)
    process.kill()
    process.communicate()
    said = finish(start(folder, output, "--ray-address", cluster))
    assert "done before" in said and "of slots idle" in said and "nats/s" in said
    assert rows(*outputs(output)) == plain


def test_what_a_cluster_cannot_do_is_one_sentence(folder, tmp_path, cluster):
    process = start(folder, tmp_path / "long", "--ray-address", cluster, "--max-model-len", "100000")
    said = process.communicate(timeout=PATIENCE)[1].splitlines()[-1]
    assert process.returncode == 2 and said.startswith("error: ") and "100000" in said and said.endswith(".")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=r"9 actors of CPU=1, and besides reading there is room for 2; .*num_cpus"):
        decode(ray.data.range(3), EngineConfig(), concurrency=9)


def test_a_dataset_has_the_texts_of_batch_lines(plain, cluster):
    asked = [line | {"topic": f"t{i}"} for i, line in enumerate(lines(0)[:48]) if "n" not in line and i != 24]
    data = ray.data.from_items(asked)
    config = EngineConfig(max_model_len=128)
    answered = decode(data, config, id="id", concurrency=1).take_all()
    assert sorted(row["id"] for row in answered) == sorted(line["id"] for line in asked)
    for row in answered:
        line = next(line for line in asked if line["id"] == row["id"])
        assert {name: row[name] for name in line} == line
        [choice], usage = plain[row["id"]][1]
        assert (row["text"], row["finish_reason"], row["error"]) == (choice["text"], choice["finish_reason"], None)
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        assert row["completion_tokens"] == usage["completion_tokens"]
        assert row["entropic"]["mean_entropy"] > 0
