"""A state on disk: save any tree of arrays, get it back bit for bit."""

import tempfile
from pathlib import Path
from typing import TypeVar

import jax

from et_jax.types import UsageError

T = TypeVar("T")


def save(path: str | Path, tree: object) -> None:
    """Write every array of `tree` into the new folder `path`, complete or not at all.

    Raises UsageError where something is there already, or the folder cannot be written.
    """
    import orbax.checkpoint as orbax

    folder = _folder(path)
    if folder.exists():
        raise UsageError(f"{path} exists already; choose another folder or delete it first.")
    try:  # before orbax starts: its threads wait minutes for a folder that never comes
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder.") from error
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def restore(path: str | Path, like: T) -> T:
    """Return the tree that was saved in the folder `path`, as `like` is: its structure, and on its devices.

    `like` is a tree of arrays, or of shapes and dtypes as `jax.eval_shape` gives. Nothing is read before
    structure, shapes and dtypes are found equal. Raises UsageError where they are not, or `path` is not
    the work of `save`.
    """
    import orbax.checkpoint as orbax

    folder = _folder(path)
    if not folder.is_dir():
        raise UsageError(f"{path} is not a folder; give one that `save` has written.")
    shapes = jax.tree.map(_shape, like)
    with orbax.StandardCheckpointer() as checkpointer:
        try:
            found = _leaves(checkpointer.metadata(folder).item_metadata.tree)
        except Exception as error:  # orbax and its store raise whatever they meet, some of it bare
            raise UsageError(f"{path} holds no readable snapshot; save it again.") from error
        _compare(path, found, _leaves(shapes))
        try:
            return checkpointer.restore(folder, shapes)
        except Exception as error:
            raise UsageError(f"{path} is damaged and cannot be read; save it again.") from error


def _folder(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _shape(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _leaves(tree: object) -> dict[str, str]:
    """Return dtype and shape of every leaf by its path, spelt alike for fields, keys and places in a tuple."""
    return {
        "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _compare(path: str | Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        saved, asked = found.get(name, "absent"), wanted.get(name, "absent")
        if saved != asked:
            raise UsageError(
                f"{path} was saved from another shape: {name} is {saved} in it and {asked} was asked for; "
                "restore it with the configuration it was saved with."
            )
