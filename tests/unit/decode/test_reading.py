"""Rows of one slot read together: each is told of its own blocks alone, whatever the rows beside it read."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import NARROW, PAGE, configuration

from et_jax.decode.attention.pruned import NOTHING, RecordedRows, log_shares
from et_jax.decode.attention.readers import FullAttentionLayer
from et_jax.decode.attention.reading import list_blocks, read_all, read_selected
from et_jax.decode.attention.reads import LayerReads
from et_jax.decode.chunk import of_rows
from et_jax.decode.rows import Rows
from et_jax.decode.state import empty
from et_jax.sums import log_sum_exp
from et_jax.types import replace

# Slot 0 has rows 0, 3 and 4; slot 1 has row 1; slot 2 has rows 2 and 5, the latter of which does not run.
AT = np.asarray([[0, 3, 4], [1, 1, 1], [2, 5, 2]], np.int32)
LENGTHS = np.asarray([21, 40, 9, 22, 23, 0], np.int32)
SLOTS = np.asarray([0, 1, 2, 0, 0, 2], np.int32)
PLANT = configuration(model=NARROW).plants[0]


def arguments(layer: int):
    rng = np.random.default_rng(layer)
    blank = empty(configuration(model=NARROW)).plants[0].cache.layers[layer]
    cached = replace(blank, pages=jnp.asarray(rng.normal(size=blank.pages.shape), jnp.float32))
    tables = np.zeros((3, 16), np.int32)
    tables[:, :8] = 1 + rng.permutation(24).reshape(3, 8)
    tables[1, 8:12] = tables[0, 4:8]
    queries = jnp.asarray(rng.normal(size=(6, NARROW.num_heads, NARROW.head_dim)), jnp.float32)
    return PLANT.model.softmax(layer), queries, cached, jnp.asarray(tables[SLOTS])


def chunk_of(table, at=None):
    lengths = jnp.asarray(LENGTHS)
    rows = Rows(slot=jnp.asarray(SLOTS), token=jnp.zeros(6, jnp.int32), position=lengths - 1, run=lengths > 0)
    return of_rows(rows, table, lengths, None if at is None else jnp.asarray(at))


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


SKIPPED = jnp.asarray(np.asarray([[2, 0], [1, 9], [0, 1]], np.int32)[SLOTS])  # blocks at the beginning, of each head


@pytest.mark.parametrize(("layer", "skipped"), [(0, None), (1, None), (1, SKIPPED)], ids=["window", "all", "skipped"])
def test_rows_of_a_slot_see_every_block_of_their_own(layer, skipped):
    softmax, queries, cached, table = arguments(layer)
    given = softmax, queries, cached
    apart, by_block = read_all(PLANT, *given, chunk_of(table), skipped)
    together, _ = read_all(PLANT, *given, chunk_of(table, AT), skipped)
    close(together, apart)
    assert np.abs(apart[:5]).min(axis=(1, 2)).all() and not apart[5].any()
    if skipped is not None:
        whole, every = read_all(PLANT, *given, chunk_of(table))
        assert by_block is not None and every is not None
        assert np.abs(whole - apart)[0].max() > 0.1
        close(by_block[0, 0, :4], every[0, 0, 2:6])  # in order from the first that is held


def test_the_mass_is_noted_by_block_where_heads_hold_less():
    softmax, queries, cached, table = arguments(1)
    chunk = chunk_of(table)
    recorded_rows = RecordedRows(rows=jnp.asarray([4, 1, 2], jnp.int32), asked=jnp.ones(3, bool))
    reader = FullAttentionLayer(skipped=SKIPPED, mass=None, recorded_rows=recorded_rows)
    _, read = reader.read(PLANT, softmax, queries[:, None], cached, None, chunk)
    assert isinstance(read, LayerReads) and read.block_lse is not None
    share = np.asarray(log_shares(read.block_lse, NARROW.num_kv_heads))
    _, every = read_all(PLANT, softmax, queries, cached, chunk)
    for number, row in enumerate((4, 1, 2)):
        held, size = -(-int(LENGTHS[row]) // PAGE), NARROW.num_heads // NARROW.num_kv_heads
        for head in range(NARROW.num_kv_heads):
            first = int(SKIPPED[row, head])
            mass = np.exp(np.asarray(every, np.float64)[row, head * size : (head + 1) * size, first:held])
            expected = (mass / mass.sum(axis=1, keepdims=True)).mean(axis=0)
            np.testing.assert_allclose(share[number, head, first:held], np.log(expected), rtol=1e-3, atol=1e-3)
            assert (share[number, head, :first] == NOTHING).all() and (share[number, head, held:] == NOTHING).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_of_a_slot_see_the_blocks_they_chose(layer):
    rng = np.random.default_rng(7)
    held = -(-LENGTHS // PAGE)
    opened = rng.random((6, NARROW.num_kv_heads, 16)) < 0.5
    opened |= np.arange(16) == held[:, None, None] - 1
    opened &= np.arange(16) < held[:, None, None]
    given = arguments(layer)
    listed = *list_blocks(jnp.asarray(opened)), jnp.asarray(opened)
    apart = read_selected(PLANT, *given[:-1], chunk_of(given[-1]), *listed)
    together = read_selected(PLANT, *given[:-1], chunk_of(given[-1], AT), *listed)
    close(together[0], apart[0])
    close(log_sum_exp(together[1]), log_sum_exp(apart[1]))
    dense, _ = read_all(PLANT, *given[:-1], chunk_of(given[-1]))
    assert np.abs(dense - apart[0]).max() > 0.1  # so it matters which blocks are read
