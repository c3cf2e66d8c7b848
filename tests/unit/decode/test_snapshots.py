"""A state on disk comes back bit for bit, or not at all."""

import itertools
import random
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.decode.cache import snapshots
from et_jax.errors import UsageError
from et_jax.types import pytree, replace


@pytree
class Tree:
    values: jax.Array
    parts: tuple[jax.Array, ...]
    notes: dict
    absent: jax.Array | None


def tree() -> Tree:
    odd = jnp.asarray([np.nan, np.inf, -0.0, 1e-45, 3.0], jnp.float32)
    notes = {"clock": {"last": jnp.bfloat16(0.3)}, "empty": {}}
    return Tree(values=odd, parts=(jnp.uint32(2**32 - 1), jnp.asarray([[True, False]])), notes=notes, absent=None)


@pytest.fixture
def saved(tmp_path):
    snapshots.save(tmp_path / "tree", tree())
    return tmp_path / "tree"


@pytest.mark.parametrize("like", [tree, lambda: jax.eval_shape(tree)], ids=["arrays", "shapes"])
def test_every_bit_and_the_structure_come_back(saved, like):
    back = snapshots.restore(saved, like())
    assert jax.tree.structure(back) == jax.tree.structure(tree())
    for old, new in zip(jax.tree.leaves(tree()), jax.tree.leaves(back), strict=True):
        assert new.dtype == old.dtype and np.asarray(new).tobytes() == np.asarray(old).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": (jnp.uint32(0),)}, r"parts/1 is bool\[1, 2\] in it and absent was asked for"),
        ({"absent": jnp.zeros(2)}, r"absent is absent in it and float32\[2\] was asked for"),
    ],
)
def test_another_shape_is_told_before_anything_is_read(saved, changes, message):
    with pytest.raises(UsageError, match=message):
        snapshots.restore(saved, replace(tree(), **changes))


def test_what_save_did_not_write_is_refused(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for name, sentence in {
        "nowhere": "nowhere is not a folder; give one that",
        "file": "file is not a folder",
        "empty": "empty has no readable snapshot",
    }.items():
        with pytest.raises(UsageError, match=sentence):
            snapshots.restore(tmp_path / name, tree())


def test_a_folder_that_cannot_be_made_is_refused_and_one_that_is_there_never_overwritten(saved, tmp_path):
    (tmp_path / "file").write_text("text")
    sentences = dict.fromkeys(("\ud800", "a\0b", "x" * 300), r"cannot be written \(.*\); choose another folder")
    sentences |= {"file/below": "cannot be written", saved.name: "exists already; choose"}
    for name, sentence in sentences.items():
        with pytest.raises(UsageError, match=sentence):
            snapshots.save(tmp_path / name, tree())


def test_a_damaged_snapshot_is_refused(saved, capfd):
    """A file lost or cut, or any bit of any file flipped; the sentence is all that is said, libraries stay silent."""
    files, draw = sorted(file for file in saved.rglob("*") if file.is_file()), random.Random(0)
    assert len(files) > 5
    for file, damage in itertools.product(files, ["lost", "cut", *["flipped"] * 6]):
        intact = file.read_bytes()
        if damage == "lost":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(intact[: len(intact) // 2])
        elif intact:
            bit = draw.randrange(8 * len(intact))
            file.write_bytes(intact[: bit // 8] + bytes([intact[bit // 8] ^ 1 << bit % 8]) + intact[bit // 8 + 1 :])
        if damage == "lost" or intact:
            with pytest.raises(UsageError, match=r"^[^\n]*; save it again\.$"):
                snapshots.restore(saved, tree())
        file.write_bytes(intact)
    snapshots.restore(saved, tree())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"a": np.float32(1), 1: np.float32(2)}, "a dictionary whose keys are of several kinds"),
        (jnp.ones(3), "A single leaf is not a tree; give it a name"),
        ({"a": {"b": 3}}, "a/b is of type int; give an array"),
        ({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}, "a is a ShapeDtypeStruct, which has no numbers"),
        ({"a": jax.random.key(0)}, "a is a typed random key; give its numbers"),
        ({"a": np.arange(3)}, "a is int64, which JAX would cut to 32 bits"),
        ({"a": jnp.zeros((0, 3))}, r"a is empty, of shape \[0, 3\]; leave it out"),
    ],
)
def test_a_leaf_that_cannot_come_back_bit_for_bit_is_refused(tmp_path, leaves, message):
    with pytest.raises(UsageError, match=message):
        snapshots.save(tmp_path / "tree", leaves)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "\ud800", "x" * 400, 3])
def test_a_leaf_may_have_any_name(tmp_path, name):
    given = {name: jnp.arange(3), "a": {"b": jnp.ones(2)}} if isinstance(name, str) else {name: jnp.arange(3)}
    snapshots.save(tmp_path / "tree", given)
    back = snapshots.restore(tmp_path / "tree", given)
    jax.tree.map(np.testing.assert_array_equal, back, given)


def test_a_donated_state_is_refused(tmp_path):
    given = {"a": jnp.ones(3)}
    jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(given)
    with pytest.raises(UsageError, match="a was donated to a step and is gone; save the state that the step returned"):
        snapshots.save(tmp_path / "tree", given)


def test_a_full_disk_leaves_nothing(tmp_path):
    """The limit on a file's size stands for the disk; under it Python would store cut modules beside the installed."""
    code = (
        "import resource, sys, jax.numpy as jnp; from et_jax.decode.cache import snapshots\n"
        "sys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"try: snapshots.save({str(tmp_path / 'tree')!r}, {{'a': jnp.arange(100_000.0)}})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    said = r"UsageError \S+tree cannot be written \(.*\); make room, or choose another folder\.\n"
    assert re.fullmatch(said, done.stdout), (done.returncode, done.stdout, done.stderr)
    assert not list(tmp_path.iterdir())
