"""A training state in few bytes, stored beside the code: weights in float32, the optimizer's memory in bfloat16.

Continuing from it continues the run up to the rounding of that memory: its averages decay
within some tens of steps, and its weights are exact.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array
from safetensors.flax import load_file, save_file

from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.models.weights import path_of_weight
from et_jax.training.loop import TrainState, initial_state
from et_jax.training.settings import Settings

_FILES = {"params": "weights.safetensors", "optimizer": "optimizer.safetensors"}


def write(state: TrainState, step: int, folder: Path) -> int:
    """Write a state after `step` steps; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, file in _FILES.items():
        leaves = _named(getattr(state, part))
        if part == "optimizer":
            leaves = {name: _rounded(leaf) for name, leaf in leaves.items()}
        save_file(leaves, folder / file)
    replace_file(folder / "step.json", json.dumps({"step": step}) + "\n")
    return sum((folder / file).stat().st_size for file in (*_FILES.values(), "step.json"))


def read(folder: Path, settings: Settings) -> tuple[TrainState, int]:
    """Return the state and its number of steps, of a run with these settings.

    Raises UsageError for a folder without a state, or with that of another model.
    """
    state = initial_state(settings)
    parts = {}
    for part, file in _FILES.items():
        if not (folder / file).exists():
            raise UsageError(
                f"{folder} holds no training state ({file} is not there); name a folder that --keep wrote."
            )
        wanted, found = _named(getattr(state, part)), load_file(folder / file)
        if {n: leaf.shape for n, leaf in wanted.items()} != {n: leaf.shape for n, leaf in found.items()}:
            raise UsageError(f"{folder / file} is the state of another model; give its own recipe.")
        leaves = [found[name].astype(leaf.dtype) for name, leaf in wanted.items()]
        parts[part] = jax.tree.structure(getattr(state, part)).unflatten(leaves)
    return TrainState(**parts), json.loads((folder / "step.json").read_text())["step"]


def is_state(folder: Path) -> bool:
    """Return whether a folder has a training state rather than a model."""
    return (folder / _FILES["optimizer"]).exists()


def _named(tree: object) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path_of_weight(path)): leaf for path, leaf in leaves}


def _rounded(leaf: Array) -> Array:
    return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf
