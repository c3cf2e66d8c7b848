"""Snapshots and converted weights: bits flipped, files cut, absent or exchanged; and trees that are none.

The library that writes the folders names and fills their files a little differently each time, so a case names what
happens to which file in order, not to which byte.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode import snapshots
from et_jax.models.checkpoint import assemble, restore_converted, save_converted
from et_jax.models.families.registry import config_to_hugging_face, from_hugging_face
from scripts.fuzzing import edits
from scripts.fuzzing.small_folder import LLAMA, overlay, random_weights
from scripts.fuzzing.watch import ACCEPTED, Fault

# Trees to save, as expressions.
_TREES = (
    *(
        "{}",
        "None",
        "{'a': None, 'b': jnp.ones(2)}",
        "{'a': 'text'}",
        "{'a': object()}",
        "{'a': 1, 'b': 2.5, 'c': True}",
    ),
    *("{'a': np.arange(3), 'b': np.float64(2)}", "{'a': np.array(['x', 'y'])}", "{'a': np.array([None, {}], object)}"),
    *("{'a/b': jnp.ones(2), 'a': {'b': jnp.zeros(2)}}", "{'': jnp.ones(2), '..': jnp.ones(1), 'a.b': jnp.ones(3)}"),
    *(r"{'\0': jnp.ones(1)}", r"{'\ud800': jnp.ones(2)}", "{'n' * 300: jnp.ones(2)}", "jnp.ones(2)"),
    *("{1: jnp.ones(2), '1': jnp.zeros(2)}", "(jnp.ones(2), [jnp.zeros((0, 3))])", "{'a': jnp.zeros((0,))}"),
    *("{'a': jax.random.key(1)}", "nested(60)", "{'a': jax.ShapeDtypeStruct((2,), jnp.float32)}"),
)
_PATHS = ("new", "new/deeper", "a b é", "n" * 300, "x\0y", "\ud800", "taken", "taken/below", "", "..", "new/../other")
_CHANGES = ("damage " * 4 + "flip " * 3 + "remove swap folder stray copy bare").split()


def draw(random: Random) -> dict[str, Any]:
    """Return a case: which folder suffers what, at which of its files; or a tree saved at a path."""
    kind = random.choice(("snapshot", "snapshot", "snapshot", "converted", "save"))
    if kind == "save":
        path = random.choice(("new", random.choice(_PATHS)))
        return {"kind": kind, "tree": random.choice(_TREES), "path": path}
    change, damages = random.choice(_CHANGES), edits.damages(random)
    return {"kind": kind, "change": change, "places": (edits.place(random), edits.place(random)), "damages": damages}


def prepare(folder: Path) -> Callable[..., str]:
    """Write a snapshot and converted weights, and return what runs a case."""
    random = np.random.default_rng(0)
    tree = {
        "cache": (jnp.asarray(random.normal(size=(256, 64)), jnp.bfloat16), jnp.asarray(random.normal(size=(300,)))),
        "length": jnp.arange(8, dtype=jnp.int32),
        "active": jnp.array([True, False]),
        "clock": jnp.float32(3.25),
        "key": jax.random.key_data(jax.random.key(7)),
        "zeros": jnp.zeros((40, 40)),
    }
    snapshots.save(folder / "snapshot", tree)
    config = from_hugging_face(config_to_hugging_face(dataclasses.replace(LLAMA, vocab_size=64)))
    weights = assemble(config, jax.tree.map(jnp.asarray, random_weights(config)))
    save_converted(folder / "converted", config, weights)

    def run(kind: str, **case: Any) -> str:
        if kind == "save":
            return _save(folder / "saved", **case)
        changed = overlay(folder / "changed", folder / kind, {})
        _change(changed, **case)
        if kind == "snapshot":
            _compare(snapshots.restore(changed, tree), tree)
            return ACCEPTED
        found, restored = restore_converted(changed)
        if found != config:
            raise Fault("silent", "config.json came back changed")
        _compare(restored, weights)
        return ACCEPTED

    return run


def nested(depth: int) -> Any:
    """Return a tree of so many levels."""
    return {"a": nested(depth - 1)} if depth else jnp.ones(2)


def _compare(restored: Any, original: Any) -> None:
    """Raise Fault unless what was accepted equals what was saved, bit for bit."""
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(original), strict=True)
    for number, (a, b) in enumerate(pairs):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise Fault("silent", f"array {number} came back changed")


def _save(folder: Path, tree: str, path: str) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "taken").write_text("a file")
    made = eval(tree)
    snapshots.save(f"{folder}/{path}", made)
    _compare(snapshots.restore(f"{folder}/{path}", jax.tree.map(jnp.asarray, made)), made)
    return ACCEPTED


def _change(folder: Path, change: str, places: tuple[int, int], damages: list[edits.Damage]) -> None:
    """Change the files of a folder; they are links, so none is changed in place."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=_order)
    file, other = (files[place % len(files)] for place in places)
    data, beside = file.read_bytes(), other.read_bytes()
    match change:
        case "damage":
            _replace(file, edits.mutated(data, damages))
        case "flip":
            _flip(files, places[0], damages[0].bytes[0])
        case "remove":
            file.unlink()
        case "swap":
            _replace(file, beside)
            _replace(other, data)
        case "copy":
            _replace(file, beside)
        case "folder":
            file.unlink()
            file.mkdir()
        case "stray":
            (file.parent / f"stray-{places[1]}").write_bytes(damages[0].bytes)
        case "bare":
            shutil.rmtree(file.parent)
            file.parent.mkdir(parents=True)


def _order(file: Path) -> tuple[str, int, str]:
    """Return a key that is the same for every writing: data files have names of chance."""
    return str(file.parent), file.stat().st_size if file.parent.name == "d" else 0, file.name


def _flip(files: list[Path], millionths: int, bit: int) -> None:
    """Flip one bit, every byte of the folder as likely as another."""
    at = millionths * sum(file.stat().st_size for file in files) // (10**6 + 1)
    for file in files:
        data = bytearray(file.read_bytes())
        if at < len(data):
            data[at] ^= 1 << bit % 8
            _replace(file, bytes(data))
            return
        at -= len(data)


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)
