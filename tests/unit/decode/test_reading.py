"""Of which blocks a head has its mass, where heads hold less than the whole sequence."""

import jax.numpy as jnp
import numpy as np
from small_model import NARROW, PAGE, configuration

from et_jax.decode.attention.pruned import NOTHING, RecordedRows, log_shares
from et_jax.decode.attention.readers import FullAttentionLayer
from et_jax.decode.attention.reading import read_all
from et_jax.decode.attention.reads import LayerReads
from et_jax.decode.chunk import of_rows
from et_jax.decode.rows import Rows
from et_jax.decode.state import empty
from et_jax.types import replace

# Slot 0 has rows 0, 3 and 4; slot 1 has row 1; slot 2 has rows 2 and 5, the latter of which does not run.
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


SKIPPED = jnp.asarray(np.asarray([[2, 0], [1, 9], [0, 1]], np.int32)[SLOTS])  # blocks at the beginning, of each head


def test_the_mass_is_noted_by_block_where_heads_hold_less():
    softmax, queries, cached, table = arguments(1)
    lengths = jnp.asarray(LENGTHS)
    rows = Rows(slot=jnp.asarray(SLOTS), token=jnp.zeros(6, jnp.int32), position=lengths - 1, run=lengths > 0)
    chunk = of_rows(rows, table, lengths, None)
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
