"""Shares of attention mass from one token to the next, against sums in numpy."""

import jax.numpy as jnp
import numpy as np

from et_jax.control.selector import Selection
from et_jax.decode.selection import blocks_of, in_units_read, shares_after

PAGE, LENGTHS = 4, np.asarray([23, 9], np.int32)  # six blocks, and three
TABLE = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
BLOCKS = blocks_of(TABLE, jnp.asarray(LENGTHS), PAGE, None)
OPENED = np.zeros((2, 2, 7), bool)
OPENED[0, 0, [0, 2, 5]], OPENED[0, 1, [4, 5]], OPENED[1, :, [0, 2]] = True, True, True


def drawn():
    """True log masses of every block, "b k g n", and shares that were known before, which are not quite those."""
    rng = np.random.default_rng(0)
    log_mass = rng.normal(size=(2, 2, 3, 7)) + 40.0
    log_mass = np.where(np.asarray(BLOCKS.readable)[:, None, None], log_mass, -np.inf)
    share = np.exp(log_mass - np.logaddexp.reduce(log_mass, axis=-1, keepdims=True))
    return log_mass, share


def listed(log_mass):
    """The log masses of the opened blocks in ascending order, then padding, as kernels give them."""
    found = np.full(log_mass.shape, -np.inf, np.float32)
    for row, head in np.ndindex(OPENED.shape[:2]):
        read = np.flatnonzero(OPENED[row, head])
        found[row, head, :, : len(read)] = log_mass[row, head][:, read]
    return found


def chosen(share):
    estimate = jnp.asarray(np.log(np.maximum(share, 1e-30)), jnp.float32)
    return Selection(opened=jnp.asarray(OPENED), estimate=estimate, upper=None, shares=True)


def test_what_was_not_read_keeps_its_share_and_what_was_has_that_of_its_keys():
    log_mass, share = drawn()
    read = listed(log_mass)
    log_read = jnp.asarray(np.logaddexp.reduce(read, axis=-1))
    guessed = in_units_read(chosen(share), BLOCKS, log_read)
    held = np.broadcast_to(np.asarray(BLOCKS.readable)[:, None, None], log_mass.shape)
    assert not guessed.shares
    left = np.where(held & ~OPENED[:, :, None], share, 0.0).sum(-1)
    right = left < 0.5  # of more than half, half is taken for unread
    assert 0 < right.mean() < 1
    np.testing.assert_allclose(
        np.asarray(guessed.estimate)[right][held[right]], log_mass[right][held[right]], rtol=1e-5
    )
    after = np.asarray(shares_after(guessed, BLOCKS, jnp.asarray(read)))
    np.testing.assert_allclose(after[right][held[right]], share[right][held[right]], rtol=1e-4)
    assert np.all(after[~held] == 1.0)
    np.testing.assert_allclose(np.where(held, after, 0.0).sum(-1), 1.0, rtol=1e-5)


def test_a_share_that_was_wrong_is_put_right_by_reading():
    log_mass, share = drawn()
    read = listed(log_mass)
    log_read = jnp.asarray(np.logaddexp.reduce(read, axis=-1))
    wrong = np.where(OPENED[:, :, None], 0.3 * share[..., ::-1], 1e-6)
    after = np.asarray(shares_after(in_units_read(chosen(wrong), BLOCKS, log_read), BLOCKS, jnp.asarray(read)))
    expected = np.exp(read - np.asarray(log_read)[..., None])
    for row, head in np.ndindex(OPENED.shape[:2]):
        blocks = np.flatnonzero(OPENED[row, head])
        np.testing.assert_allclose(after[row, head][:, blocks], expected[row, head][:, : len(blocks)], rtol=1e-4)
