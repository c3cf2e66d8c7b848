"""What blocks contribute: the exact change where summaries say everything, the same bits beside longer sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_views import blocks_at
from drawn_blocks import NUM_BLOCKS, Blocks, blocks, drawn
from hypothesis import given, settings

from et_jax.control.contribution import influence, relative_influence, token_nll
from et_jax.control.view import mass
from et_jax.types import replace

HELD, BLOCKS, PAGE, GROUP, DIM = 41, 70, 2, 3, 8


@settings(max_examples=40, deadline=None)
@given(drawn(families=("single",), spread=6.0))
def test_influence_of_single_tokens_is_how_far_the_output_moves_without_them(b: Blocks):
    """With one token a block the summaries say everything, so the estimate is the exact leave-one-out change."""
    key, value = b.key[b.held, 0].astype(np.float64), b.value[b.held, 0].astype(np.float64)
    weight = np.exp(np.asarray(b.view.query, np.float64) @ key.T)
    out = weight @ value / weight.sum(-1, keepdims=True)
    rest = weight[:, None] * (1 - np.eye(len(key)))  # "g n n": without each block in turn
    with np.errstate(invalid="ignore"):
        moved = np.linalg.norm(out[:, None] - rest @ value / rest.sum(-1, keepdims=True), axis=-1)
    moved = moved if len(key) > 1 else np.full_like(moved, np.inf)  # a block that has all the mass
    got, relative = map(np.asarray, both(b.view))
    assert np.all(got[:, ~b.held] == 0)
    np.testing.assert_allclose(got[:, b.held], moved, rtol=2e-3, atol=1e-4)
    length = np.linalg.norm(out, axis=-1, keepdims=True)
    np.testing.assert_allclose(relative * length, got, rtol=1e-4)


@jax.jit
def both(view):
    share = mass(view)
    return influence(view, share), relative_influence(view, share)


@pytest.mark.parametrize("most_held", [HELD, 64, BLOCKS])
def test_how_long_the_longest_sequence_is_changes_no_contribution(most_held):
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(BLOCKS * PAGE, DIM)), jnp.float32) for _ in "kv")
    query = jnp.asarray(rng.normal(size=(GROUP, DIM)), jnp.float32)
    view = blocks_at(query, key, value, jnp.int32(HELD * PAGE - 1), PAGE).view
    each = jax.jit(lambda view: relative_influence(view, mass(view)))
    alone, together = each(view), each(replace(view, most_held=jnp.int32(most_held)))
    np.testing.assert_array_equal(together, alone)
    assert np.all(alone[:, :HELD] > 0) and not np.any(alone[:, HELD:])


def test_token_nll_weighs_surprisals_by_the_mass():
    b = blocks(7)
    stored = np.linspace(0.5, 5, NUM_BLOCKS)
    got = token_nll(replace(b.view, mean_surprisal=jnp.asarray(stored, jnp.float32)), mass(b.view))
    np.testing.assert_allclose(got, b.mean_shares * stored, rtol=1e-4, atol=1e-6)
