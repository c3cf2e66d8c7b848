"""Notes of a layer that travel as words come back as they were, of one layer and of several that a scan ran."""

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.attention.reads import AllRead, ByHead, LayerReads
from et_jax.decode.packed import Packed, packed, unpacked
from et_jax.models.stacks import Turns

ROWS, HEADS, WORDS = 3, 4, 2


def notes(turn=1) -> LayerReads:
    kept = jnp.linspace(-1.0, jnp.inf, ROWS * HEADS).reshape(ROWS, HEADS).at[0, 0].set(jnp.nan) * turn
    mask = jnp.arange(ROWS * HEADS * WORDS, dtype=jnp.uint32).reshape(ROWS, HEADS, WORDS) << 28
    return LayerReads(block_mask=mask, block_mass=None, by_head=ByHead(kept=kept, entropy=-kept))


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_notes_come_back_as_they_were():
    assert isinstance(packed(notes()), Packed)
    assert_same(unpacked(packed(notes())), notes())
    _, many = jax.lax.scan(lambda turn, _: (turn + 1, packed(notes(turn))), jnp.float32(1), length=4)
    told = unpacked((Turns(of_period=(many,), depth=4), None))
    assert_same(told, (Turns(of_period=(jax.vmap(notes)(jnp.arange(1.0, 5.0)),), depth=4), None))


def test_what_are_no_words_of_one_number_of_rows_stays_as_it_is():
    for one in (AllRead(), {"alone": jnp.zeros(3)}, (jnp.zeros(3), jnp.zeros(4)), (jnp.zeros(3), jnp.zeros(3, bool))):
        assert packed(one) is one
