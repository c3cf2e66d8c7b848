"""Snapshots and converted weights: bits flipped, files cut, absent or exchanged.

The library that writes the folders names and fills their files a little differently each time, so a case names what
happens to which file in order, not to which byte.
"""

import dataclasses
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

_CHANGES = ("damage " * 4 + "flip " * 3 + "remove swap folder stray copy bare").split()


def draw(random: Random) -> dict[str, Any]:
    """Return a case: a folder and the change of its files."""
    kind = random.choice(("snapshot", "snapshot", "snapshot", "converted"))
    change, places = random.choice(_CHANGES), (edits.place(random), edits.place(random))
    return {"kind": kind, "change": change, "places": places, "damages": edits.damages(random)}


def prepare(folder: Path) -> Callable[..., str]:
    """Write a snapshot and converted weights, and return the function that runs a case."""
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
        changed = overlay(folder / "changed", folder / kind, _changed(folder / kind, **case))
        if kind == "snapshot":
            _compare(snapshots.restore(changed, tree), tree)
        else:
            found, restored = restore_converted(changed)
            _compare(restored, weights)
            if found != config:
                raise Fault("silent", "config.json came back changed")
        return ACCEPTED

    return run


def _compare(restored: Any, original: Any) -> None:
    """Raise Fault unless what was accepted equals what was saved, bit for bit."""
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(original), strict=True)
    for number, (a, b) in enumerate(pairs):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise Fault("silent", f"array {number} came back changed")


def _changed(folder: Path, change: str, places: tuple[int, int], damages: list[edits.Damage]) -> dict[str, Any]:
    """Return the files that a change differs in, None for one that is absent."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=_order)
    if change == "flip":  # of the arrays' files alone
        files = [file for file in files if file.parent.name == "d"]
    file, other = (files[place % len(files)] for place in places)
    name, beside = (str(path.relative_to(folder)) for path in (file, other))
    match change:
        case "damage":
            return {name: edits.mutated(file.read_bytes(), damages)}
        case "flip":
            return {name: edits.mutated(file.read_bytes(), [damages[0]._replace(kind="flip")])}
        case "swap":
            return {name: other.read_bytes(), beside: file.read_bytes()}
        case "copy":
            return {name: other.read_bytes()}
        case "stray":
            return {f"{name}-stray": damages[0].bytes}
        case "bare":
            return {str(path.relative_to(folder)): None for path in files if path.is_relative_to(file.parent)}
    return {f"{name}/" if change == "folder" else name: None}


def _order(file: Path) -> tuple[str, int, str]:
    """Return a key that is the same for every writing: the names of data files are random."""
    return str(file.parent), file.stat().st_size if file.parent.name == "d" else 0, file.name
