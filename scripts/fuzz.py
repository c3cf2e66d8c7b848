"""Damage model folders, GGUF files and snapshots at random: each opens, or is refused in one sentence.

    python -m scripts.fuzz [--cases 2000] [--seed 0]
    python -m scripts.fuzz --only 17

A case changes one file of a valid folder: values of its JSON, or its bytes. It depends on the seed and its number
alone. Worker processes run the cases, each within 10 seconds and 4 GB; `--only` runs one case here and prints it. A
case is accepted, refused, or a failure; the exit code is 1 where there are failures.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.cache import snapshots
from et_jax.errors import UsageError
from et_jax.models import checkpoint
from et_jax.models.config import ExpertConfig
from et_jax.serve import engine
from scripts.measuring.shapes import SMALL, random_folder
from scripts.peers.gguf_file import write_gguf

SECONDS, STARTING, MEMORY = 10.0, 300.0, 4 * 2**30  # limits of a case; of imports; of a worker's new memory
LLAMA = dataclasses.replace(SMALL, vocab_size=4096, max_positions=128)
EXPERTS = ExpertConfig(num_experts=4, num_per_token=2, width=48, normalised=True, layers=(True, True))
MODELS = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, architecture="mistral", windows=(32, 32)),
    "mixtral": dataclasses.replace(LLAMA, architecture="mixtral", experts=EXPERTS),
}
BASES = (*MODELS, "gguf", "snapshot")
TREE = {"cache": jnp.arange(3000.0).reshape(30, 100), "length": jnp.arange(8), "zeros": jnp.zeros((40, 40))}
VALUES = [
    *("null", "true", "[]", "{}", "[null]", "[1, 2]", '["a"]', '{"a": 1}', '"7"', '""', '"a\\nb"', '"\\ud800"'),
    *("0", "1", "3", "-1", "0.5", "-0.0", "1e-320", "1e308", "NaN", "Infinity", "1e400", "2147483648", "9" * 5000),
    *('"../x"', '"/etc/passwd"', '"/dev/zero"', '"x/../../x"', '"{{ 1 }}"', '{"Regex": "(a*)*b"}', '{"content": {}}'),
    *('"' + "x" * 10**5 + '"', "[" + "1, " * 10**5 + "1]", "[" * 10**5 + "]" * 10**5, "[" * 500 + "]" * 500),
]  # as JSON text, since Python has no value for much of it


def made(folder: Path) -> None:
    """Write what cases begin with."""
    for name, config in MODELS.items():
        random_folder(folder / name, config, "float32")
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf/model.gguf", folder / "llama", "Q8_0")
    snapshots.save(folder / "snapshot", TREE)


def places(document: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the places of a document as holders and keys; of what is wide only the ends."""
    keys = list(document) if isinstance(document, dict) else [*range(len(document))]
    for key in keys if len(keys) <= 40 else keys[:3] + keys[-3:]:
        yield document, key
        if depth < 6 and isinstance(document[key], dict | list):
            yield from places(document[key], depth + 1)


def edited(data: bytes, draw: Random) -> bytes:
    """Return a JSON document with one to three of its values changed, removed, renamed or given twice."""
    document, marks = json.loads(data), {}
    for number in range(draw.choice((1, 1, 1, 2, 3))):
        there = [*places(document)] if isinstance(document, dict | list) else []
        if not there:
            break
        holder, key = draw.choice(there)
        kind = draw.choice(("replace", "replace", "replace", "scale", "delete", "rename", "twice", "wrap"))
        old = holder[key]
        if kind == "delete":
            del holder[key]
        elif kind == "wrap":
            holder[key] = [old]
        elif kind == "scale" and type(old) in (int, float):
            holder[key] = old * draw.choice((-1, 2, 0.5, 1000, 10**9)) + draw.choice((0, 1))
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        else:
            marks[f'"mark {number}"'] = draw.choice(VALUES)
            twin = f"{key}twin {number}" if kind == "twice" and isinstance(holder, dict) else key
            holder[twin] = f"mark {number}"
            marks[f"twin {number}"] = ""  # two keys of the same text
    text = json.dumps(document)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode("utf-8", "surrogatepass")


def damaged(data: bytes, draw: Random) -> bytes:
    """Return bytes of which one is flipped, some are lost, added or zero, or that end early."""
    at, some = draw.randrange(len(data) + 1), draw.randbytes(draw.randint(1, 9))
    flipped = data[:at] + bytes([(data[at] if at < len(data) else 0) ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    ways = data[:at], data[:at] + data[at + len(some) :], data[:at] + some + data[at:], data + data, b""
    return draw.choice((flipped, flipped, flipped, data[:at] + bytes(len(data) - at), *ways))


def changed(file: Path, draw: Random) -> bytes:
    """Return what a file holds after a change; the header of weights is JSON too."""
    data = file.read_bytes()
    if file.suffix == ".json" and draw.random() < 0.75:
        return edited(data, draw)
    if file.suffix == ".safetensors" and draw.random() < 0.6:
        end = 8 + int.from_bytes(data[:8], "little")
        header = edited(data[8:end], draw)
        return len(header).to_bytes(8, "little") + header + data[end:]
    if file.suffix == ".gguf" and draw.random() < 0.8:  # what stands before the numbers
        return damaged(data[:9000], draw) + data[9000:]
    return damaged(data, draw)


def opened(base: str, folder: Path) -> None:
    """Open what was changed. Raises ValueError where a snapshot comes back as another."""
    if base == "gguf":
        checkpoint.load(folder / "model.gguf")
    elif base == "snapshot":
        pairs = zip(jax.tree.leaves(snapshots.restore(folder, TREE)), jax.tree.leaves(TREE), strict=True)
        if any(np.asarray(one).tobytes() != np.asarray(other).tobytes() for one, other in pairs):
            raise AssertionError("the damage was accepted without a word")
    else:
        engine.load(str(folder), max_num_seqs=2, compilation_cache=None).describe()


def case(folder: Path, seed: int, number: int) -> dict[str, Any]:
    """Run a case, and return what was changed and how it ended."""
    draw = Random(f"{seed}/{number}")
    base = draw.choice(BASES)
    files = sorted((path for path in (folder / base).rglob("*") if path.is_file()), key=lambda one: one.stat().st_size)
    file, copy = draw.choice(files), folder / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / base, copy)
    (copy / file.relative_to(folder / base)).write_bytes(changed(file, draw))
    found = {"number": number, "base": base, "file": file.name, "outcome": "accepted", "detail": ""}
    try:
        opened(base, copy)
    except UsageError as error:
        said = str(error)
        sound = said.endswith(".") and said.isprintable() and len(said) < 600
        found |= {"outcome": "refused" if sound else "no sentence", "detail": said[:300]}
    except BaseException as error:  # a panic of a library is not an Exception
        found |= {"outcome": "traceback", "detail": "".join(traceback.format_exception(error))[-600:]}
    return found


def work(folder: Path, seed: int, numbers: range, results: Connection) -> None:
    """Run cases in this process, which prints nothing, and send what came of each."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    results.send(None)
    for number in numbers:
        results.send(case(folder, seed, number))


def run(folder: Path, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield what came of each case; a worker that ends or takes too long has failed at its case."""
    context, number = multiprocessing.get_context("spawn"), 0
    while number < count:
        results, end = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(folder, seed, range(number, count), end), daemon=True)
        process.start()
        end.close()
        try:
            started = results.poll(STARTING) and results.recv() is None
            while started and number < count and results.poll(SECONDS):
                yield results.recv()
                number += 1
        except EOFError:
            pass
        process.kill()
        if number < count:
            yield {"number": number, "outcome": "hang or crash", "detail": ""}
            number += 1


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NUMBER", type=int, help="one case, in this process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        made(Path(name))
        one = args.only is not None
        counts, failed = collections.Counter[str](), 0
        for row in [case(Path(name), args.seed, args.only)] if one else run(Path(name), args.seed, args.cases):
            counts[row["outcome"]] += 1
            if one or row["outcome"] not in ("accepted", "refused"):
                print(json.dumps(row), flush=True)
            failed += row["outcome"] not in ("accepted", "refused")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
