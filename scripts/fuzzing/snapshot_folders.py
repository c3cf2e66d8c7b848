"""Snapshots and converted weights: bits flipped, files cut, absent or exchanged; and trees that are none.

The library that writes the folders names and fills their files a little differently each time, so a case
says what happens where, not to which byte.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzzing.cases import ACCEPTED, Fault, Surface
from fuzzing.edits import DAMAGES, PLACES, Damage, damaged
from fuzzing.small_folder import LLAMA, overlay, random_weights
from hypothesis import strategies as st

from et_jax.decode import snapshots
from et_jax.models.checkpoint import assemble, restore_converted, save_converted
from et_jax.models.families.registry import config_to_hugging_face, from_hugging_face

_TREES: dict[str, Callable[[], Any]] = {
    "empty": dict,
    "none": lambda: None,
    "none inside": lambda: {"a": None, "b": jnp.ones(2)},
    "text": lambda: {"a": "text"},
    "object": lambda: {"a": object()},
    "numbers": lambda: {"a": 1, "b": 2.5, "c": True},
    "numpy": lambda: {"a": np.arange(3), "b": np.float64(2)},
    "texts": lambda: {"a": np.array(["x", "y"])},
    "objects": lambda: {"a": np.array([None, {}], dtype=object)},
    "slashes": lambda: {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}},
    "odd names": lambda: {"": jnp.ones(2), "..": jnp.ones(1), "a.b": jnp.ones(3), "\0": jnp.ones(1)},
    "surrogate": lambda: {"\ud800": jnp.ones(2)},
    "long name": lambda: {"n" * 300: jnp.ones(2)},
    "mixed keys": lambda: {1: jnp.ones(2), "1": jnp.zeros(2)},
    "tuple": lambda: (jnp.ones(2), [jnp.zeros((0, 3))]),
    "array": lambda: jnp.ones(2),
    "empty array": lambda: {"a": jnp.zeros((0,))},
    "keys": lambda: {"a": jax.random.key(1)},
    "deep": lambda: _nested(60),
    "shapes": lambda: {"a": jax.ShapeDtypeStruct((2,), jnp.float32)},
}
_PATHS = ("new", "new/deeper", "a b é", "n" * 300, "x\0y", "\ud800", "taken", "taken/below", "", "..", "new/../other")
_CHANGES = (
    "damage",
    "damage",
    "damage",
    "damage",
    "flip",
    "flip",
    "flip",
    "remove",
    "swap",
    "folder",
    "stray",
    "copy",
    "bare",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Which folder suffers what, at which of its files; or a tree saved at a path."""

    kind: str
    change: str
    damages: tuple[Damage, ...]
    file: int
    other: int
    tree: str
    path: str


def prepare(folder: Path) -> Callable[[Case], str]:
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

    def run(case: Case) -> str:
        if case.kind == "save":
            return _save(folder / "saved", case)
        changed = overlay(folder / "changed", folder / case.kind, {})
        _change(changed, case)
        if case.kind == "snapshot":
            restored, original = snapshots.restore(changed, tree), tree
        else:
            found, restored = restore_converted(changed)
            if found != config:
                raise Fault("silent", "config.json came back changed")
            original = weights
        _compare(restored, original)
        return ACCEPTED

    return run


def _nested(depth: int) -> Any:
    return {"a": _nested(depth - 1)} if depth else jnp.ones(2)


def _compare(restored: Any, original: Any) -> None:
    """Find out whether what was accepted is what was saved, bit for bit."""
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(original), strict=True)
    for number, (a, b) in enumerate(pairs):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise Fault("silent", f"array {number} came back changed")


def _save(folder: Path, case: Case) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "taken").write_text("a file")
    tree = _TREES[case.tree]()
    path = f"{folder}/{case.path}"
    snapshots.save(path, tree)
    _compare(snapshots.restore(path, jax.tree.map(jnp.asarray, tree)), tree)
    return ACCEPTED


def _change(folder: Path, case: Case) -> None:
    """Do to the files of a folder what the case says; they are links, so none is changed in place."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=_order)
    file, other = files[case.file % len(files)], files[case.other % len(files)]
    data, beside = file.read_bytes(), other.read_bytes()
    match case.change:
        case "damage":
            for damage in case.damages:
                data = damaged(data, damage)
            _replace(file, data)
        case "flip":
            _flip(files, case.file, case.damages[0].bytes[0])
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
            (file.parent / f"stray-{case.other}").write_bytes(case.damages[0].bytes)
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


SURFACE = Surface(
    cases=st.builds(
        Case,
        kind=st.sampled_from(("snapshot", "snapshot", "snapshot", "converted", "save")),
        change=st.sampled_from(_CHANGES),
        damages=st.lists(DAMAGES, min_size=1, max_size=2).map(tuple),
        file=PLACES,
        other=PLACES,
        tree=st.sampled_from(tuple(_TREES)),
        path=st.sampled_from((*("new",) * 12, *_PATHS)),
    ),
    prepare=prepare,
)
