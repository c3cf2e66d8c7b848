"""The residual under caps and sinks: where every page is one token, what is left out is made up for exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL

from et_jax.control.select import SinksWindow
from et_jax.control.selector import Selection
from et_jax.decode import cache as kv
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.decode.readers import AllOfLayer, SelectedOfLayer
from et_jax.decode.selection import blocks_of, with_residual
from et_jax.softmax import Softmax

ROWS, TOKENS = 3, 12
PLANT = Plant(model=MODEL, page_size=1, backend="xla", scores_backend="xla")


def read(reader, softmax: Softmax):
    """Attention of one token a row to a cache of random keys and values, by a reader."""
    rng, c = np.random.default_rng(0), MODEL
    table = jnp.arange(1, ROWS * TOKENS + 1, dtype=jnp.int32).reshape(ROWS, TOKENS)
    key, value = (jnp.asarray(rng.normal(size=(ROWS, TOKENS, c.num_kv_heads, c.head_dim)), jnp.float32) for _ in "kv")
    length = jnp.asarray([TOKENS, 7, 9], jnp.int32)
    blank = kv.empty(1, c.num_kv_heads, c.head_dim, ROWS * TOKENS + 1, 1, jnp.float32).layers[0]
    cached = kv.write(blank, key, value, table, jnp.zeros(ROWS, jnp.int32), length)
    query = jnp.asarray(3 * rng.normal(size=(ROWS, 1, c.num_heads, c.head_dim)), jnp.float32)
    one = jnp.ones(ROWS, jnp.int32)
    token, start = jnp.zeros((ROWS, 1), jnp.int32), length - 1
    chunk = Chunk(slot=None, table=table, token=token, position=start, start=start, count=one, end=length)
    return np.asarray(reader.read(PLANT, softmax, query, cached, None, chunk)[0])


def pruned(residual: bool) -> SelectedOfLayer:
    return SelectedOfLayer(
        tolerance=jnp.zeros(ROWS),
        fresh=jnp.ones(ROWS, bool),
        last=jnp.zeros((ROWS, MODEL.num_kv_heads, 1), jnp.uint32),
        kept_mass=jnp.ones(ROWS),
        selector=SinksWindow(jnp.full(ROWS, 1), jnp.full(ROWS, 2)),
        min_context=None,
        mass=None,
        sensitivity=None,
        refresh_every=1,
        residual=residual,
        noting=None,
        chooses=True,
    )


@pytest.mark.parametrize("soft_cap", [None, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sinks", [False, True])
def test_with_one_token_a_page_the_residual_makes_up_for_what_was_left_out(soft_cap, sinks):
    logits = jnp.asarray([1.0, 3.0, -1.0, 2.0]) if sinks else None
    softmax = Softmax(scale=MODEL.head_dim**-0.5, soft_cap=soft_cap, sink_logits=logits)
    whole = read(AllOfLayer(skipped=None, mass=None, noting=None), softmax)
    np.testing.assert_allclose(read(pruned(True), softmax), whole, atol=1e-5)
    assert np.abs(read(pruned(False), softmax) - whole).max() > 0.05


def test_a_row_of_the_residual_has_the_same_bits_in_any_company_and_capacity():
    """What lies beyond a row's own blocks adds nothing, and pages that nobody holds may be anything."""
    rng = np.random.default_rng(4)
    k, g, d, page, capacity, lengths = 2, 3, 8, 4, 130, [9, 300, 131, 517]
    table = 1 + np.arange(4 * capacity).reshape(4, capacity)
    mean = np.full((k, 1 + 4 * capacity, 2 * d), np.nan, np.float32)
    held = [-(-length // page) for length in lengths]
    for row, blocks in enumerate(held):
        mean[:, table[row, :blocks]] = rng.normal(size=(k, blocks, 2 * d))
        table[row, blocks:] = 0
    opened = (rng.random((4, k, capacity)) < 0.2) & (np.arange(capacity) < np.reshape(held, (4, 1, 1)))
    estimate = rng.normal(size=(4, k, g, capacity)).astype(np.float32)
    out, log_read = rng.normal(size=(4, k, g, d)).astype(np.float32), np.full((4, k, g), 2.0, np.float32)

    def made_up(rows: slice, num_blocks: int) -> np.ndarray:
        length = jnp.asarray(lengths[rows], jnp.int32)
        blocks = blocks_of(jnp.asarray(table[rows, :num_blocks], jnp.int32), length, page, None)
        chosen = Selection(
            opened=jnp.asarray(opened[rows, :, :num_blocks]),
            estimate=jnp.asarray(estimate[rows, ..., :num_blocks]),
            upper=None,
        )
        given = jnp.asarray(out[rows]), chosen, blocks, jnp.asarray(log_read[rows]), jnp.asarray(mean)
        return np.asarray(jax.jit(with_residual)(*given))

    together = made_up(slice(0, 4), capacity)
    assert np.isfinite(together).all()
    for row, blocks in enumerate(held):
        for num_blocks in (blocks, min(blocks + 40, capacity)):
            np.testing.assert_array_equal(made_up(slice(row, row + 1), num_blocks)[0], together[row])
    weight = np.where(~opened & (np.arange(capacity) < np.reshape(held, (4, 1, 1))), 1.0, 0.0)[:, :, None] * np.exp(
        estimate
    )
    value = np.nan_to_num(mean[:, table, d:]).swapaxes(0, 1)
    whole = np.exp(2.0) * out + np.einsum("bkgn,bknd->bkgd", weight, value)
    np.testing.assert_allclose(together, whole / (np.exp(2.0) + weight.sum(-1))[..., None], rtol=1e-4, atol=1e-5)
