"""A state on disk: saves any tree of arrays, and restores it bit for bit or not at all."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.errors import UsageError
from et_jax.io import checksums
from et_jax.io.files import expanded

T = TypeVar("T")


def save(path: str | Path, tree: object) -> None:
    """Write every array of `tree` into the new folder `path`, with checksums, complete or not at all.

    Raises UsageError if the path exists already, the folder cannot be written, or a leaf of the tree
    is not an array of numbers.
    """
    import orbax.checkpoint as orbax

    folder = _folder(path)
    if os.path.lexists(folder):
        raise UsageError(f"{path} exists already; choose another folder or delete it first.")
    leaves = _leaves(tree)
    for name, leaf in leaves:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise UsageError(f"{name} is a {type(leaf).__name__}, which has no numbers; give an array.")
    try:  # before orbax starts: its threads wait minutes for a folder that cannot be created
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    except (OSError, ValueError) as error:  # the latter for an invalid file name
        raise UsageError(f"{path} cannot be written ({_reason(error)}); choose another folder.") from error
    with unfinished as parent, _quiet():
        written = Path(parent) / "tree"
        try:
            with orbax.StandardCheckpointer() as checkpointer:
                checkpointer.save(written, _numbered(leaf for _, leaf in leaves))
            checksums.seal(written, leaves=_specs(leaves), version=version("et_jax"))
            written.rename(folder)
        except Exception as error:  # orbax and its store raise anything, some of it undocumented
            raise UsageError(
                f"{path} cannot be written ({_reason(error)}); make room, or choose another folder."
            ) from error


def restore(path: str | Path, like: T) -> T:
    """Return the tree that was saved in the folder `path`, with the structure and devices of `like`.

    `like` is a tree of arrays, or of shapes and dtypes as `jax.eval_shape` returns. All checksums, the structure,
    shapes and dtypes are verified before anything is read. Raises
    UsageError if they differ, or `path` was not written by `save`.
    """
    import orbax.checkpoint as orbax

    folder = _folder(path)
    if not os.path.isdir(folder):  # False for an invalid file name too
        raise UsageError(f"{path} is not a folder; give one that `save` has written.")
    leaves = _leaves(like)
    if not any((folder / name).exists() for name in (checksums.FILE, "_METADATA")):
        raise UsageError(f"{path} has no readable snapshot; save it again.")
    sealed = checksums.check(folder, "save it again")
    if "leaves" not in sealed:
        raise UsageError(f"{path} has no readable snapshot; save it again.")
    _compare(path, sealed, _specs(leaves))
    with _quiet(), orbax.StandardCheckpointer() as checkpointer:
        try:
            found = checkpointer.restore(folder, _numbered(_shape(leaf) for _, leaf in leaves))
        except Exception as error:  # orbax and its store raise anything, some of it undocumented
            raise UsageError(f"{path} cannot be read by this version of orbax; save it again.") from error
    return jax.tree.unflatten(jax.tree.structure(like), [found[number] for number in _numbered(leaves)])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress orbax's log of a failure: the caller reports it in one sentence."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _leaves(tree: object) -> list[tuple[str, Any]]:
    """Return every leaf and its path.

    Raises UsageError for a tree without arrays, or a leaf that cannot be saved bit for bit.
    """
    try:
        leaves = jax.tree.leaves_with_path(tree)
    except ValueError as error:  # JAX sorts the keys of a dictionary
        raise UsageError(
            "The tree has a dictionary whose keys are of several kinds; name them all by texts."
        ) from error
    if not leaves:
        raise UsageError("The tree has no arrays; there is nothing to save or restore.")
    for path, leaf in leaves:
        name = _name(path)
        if not path:
            raise UsageError("A single leaf is not a tree; give it a name, as in {'values': array}.")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UsageError(f"{name} is of type {type(leaf).__name__}; give an array, as jnp.asarray makes one.")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UsageError(f"{name} is a typed random key; give its numbers, jax.random.key_data(key).")
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise UsageError(f"{name} has dtype {leaf.dtype}; give an array of numbers.")
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise UsageError(f"{name} is {leaf.dtype}, which JAX would cut to 32 bits; cast it, or set jax_enable_x64.")
        if 0 in leaf.shape:
            raise UsageError(f"{name} is empty, of shape {list(leaf.shape)}; leave it out of the tree.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise UsageError(f"{name} was donated to a step and is gone; save the state that the step returned.")
    return [(_name(path), leaf) for path, leaf in leaves]


def _folder(path: str | Path) -> Path:
    return expanded(path).absolute()


def _shape(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _name(path: jax.tree_util.KeyPath) -> str:
    """Return the path of a leaf, spelt alike for fields, keys and tuple indices."""
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def _numbered(leaves: Iterable[Any]) -> dict[str, Any]:
    """Return leaves under numbered names, the only ones that orbax receives."""
    return {str(number): leaf for number, leaf in enumerate(leaves)}


def _specs(leaves: list[tuple[str, Any]]) -> list[list[str]]:
    """Return path, dtype and shape of every leaf."""
    return [[name, f"{leaf.dtype}{list(leaf.shape)}"] for name, leaf in leaves]


def _compare(path: str | Path, sealed: dict[str, Any], wanted: list[list[str]]) -> None:
    found = sealed["leaves"]
    if found == wanted:
        return
    saved, asked = ({name: spec for name, spec in specs} for specs in (found, wanted))
    differing = [name for name in sorted(saved.keys() | asked.keys()) if saved.get(name) != asked.get(name)]
    name = differing[0] if differing else "the order of its leaves"
    raise UsageError(
        f"{path} was saved from another shape, by et_jax {sealed.get('version', '0.1')}: {name} is "
        f"{saved.get(name, 'absent')} in it and {asked.get(name, 'absent')} was asked for; restore it with the "
        "configuration and the version it was saved with."
    )


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return said.splitlines()[0][:200]
