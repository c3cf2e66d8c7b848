"""A model that drafts for itself: which blocks held the mass, of heads that hold less too, and what it reads."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import NARROW, PAGE, configuration

from et_jax.control.base import pack_blocks, unpack_blocks
from et_jax.control.draft import PastDrafts, StepTimes
from et_jax.control.draft_speed import RooflineLength
from et_jax.decode.attention.pruned import NOTHING, RecordedRows, heavy, heavy_blocks, heavy_of, log_shares
from et_jax.decode.attention.readers import FullAttentionLayer
from et_jax.decode.attention.reading import read_all
from et_jax.decode.attention.reads import LayerReads
from et_jax.decode.chunk import of_rows
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.decode.rows import Rows
from et_jax.decode.state import empty
from et_jax.types import replace

BLOCKS = 40


def masses(seed: int) -> np.ndarray:
    """Log masses of 3 rows, 4 query heads: heavy tails, as attention has."""
    return np.random.default_rng(seed).normal(0.0, 3.0, (3, 4, BLOCKS)).astype(np.float32)


def shares(block_lse: np.ndarray) -> np.ndarray:
    """In float64: of each block the share of mass, the mean of two query heads a KV head."""
    mass = np.exp(block_lse.astype(np.float64))
    return (mass / mass.sum(-1, keepdims=True)).reshape(3, 2, 2, BLOCKS).mean(2)


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_the_blocks_chosen_are_the_fewest_that_hold_the_mass(mass):
    block_lse = masses(1)
    log_share = log_shares(jnp.asarray(block_lse), 2)
    np.testing.assert_allclose(np.exp(log_share), shares(block_lse), rtol=1e-4, atol=1e-9)
    packed = heavy_blocks(Pruned(mass=mass, share=1.0), log_share[:, None], jnp.full(3, BLOCKS, jnp.int32))
    opened = np.asarray(unpack_blocks(packed))[:, 0, :, :BLOCKS]
    for share, chosen in zip(shares(block_lse).reshape(-1, BLOCKS), opened.reshape(-1, BLOCKS), strict=True):
        ranked = np.sort(share)[::-1]
        fewest = int(np.searchsorted(np.cumsum(ranked), mass)) + 1
        assert chosen.sum() in (fewest, fewest + 1)  # two as good as one another are not told apart
        assert share[chosen].min() >= share[~chosen].max(initial=0.0) and share[chosen].sum() >= mass
    # nor are more chosen than their share of all that are held
    packed = heavy_blocks(Pruned(mass=1.0, share=0.2), log_share[:, None], jnp.asarray([40, 20, 5], jnp.int32))
    counts = np.asarray(unpack_blocks(packed)).sum(-1)[:, 0]
    assert all(most - 1 <= count <= most for row, most in zip(counts, (8, 4, 1), strict=True) for count in row)


@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_what_held_the_mass_is_noted_of_every_layer_where_it_is_asked(rows):
    how, layers = Pruned(mass=0.9, share=0.5), [jnp.asarray(masses(seed)) for seed in (3, 4)]
    masks, held = jnp.zeros((3, 2, 2, 2), jnp.uint32), jnp.full(3 if rows is None else 2, BLOCKS, jnp.int32)
    given = None if rows is None else jnp.asarray(rows)

    def noted(*asked: bool) -> np.ndarray:
        recorded_rows = RecordedRows(rows=given, asked=jnp.asarray(asked)[: len(held)])
        return np.asarray(heavy_of(how, recorded_rows, tuple(map(recorded_rows.of, layers)), held, masks))

    assert not noted(False, False, False).any()
    for layer, block_lse in enumerate(layers):
        alone = heavy_blocks(how, log_shares(block_lse, 2)[:, None], jnp.full(3, BLOCKS, jnp.int32))[:, 0]
        alone = alone | pack_blocks(jnp.arange(BLOCKS) == BLOCKS - 1)
        alone = np.asarray(alone if given is None else alone[given])
        np.testing.assert_array_equal(noted(True, True, True)[:, layer], alone)
        some = noted(False, True, True)[:, layer]
        assert not some[0].any() and np.array_equal(some[1:], alone[1:])


def test_a_draft_reads_those_the_first_that_each_head_holds_and_what_is_written_since():
    opened = np.zeros((1, 1, 2, BLOCKS), bool)
    opened[0, 0, 0, [3, 7]] = opened[0, 0, 1, [5]] = True

    def lists(opened, steps: int, skipped=None) -> list[list[int]]:
        length = jnp.asarray([64], jnp.int32)  # the last token stands in block 15, the newest and drafted ones behind
        found = heavy(Pruned(share=0.1), steps, pack_blocks(jnp.asarray(opened)), BLOCKS, length, 4, skipped)
        return [found.listed[0, 0, head, : int(found.counts[0, 0, head])].tolist() for head in (0, 1)]

    assert lists(opened, 6) == [[0, 3, 7, 15, 16, 17], [0, 5, 15, 16, 17]]
    nothing, skipped = np.zeros_like(opened), jnp.asarray([[[2, 0]]], jnp.int32)
    assert lists(nothing, 1, skipped) == [[2, 15, 16], [0, 15, 16]]


@pytest.mark.parametrize(("context", "wants"), [(100, False), (60_000, True)])
def test_a_text_wants_a_draft_at_its_first_step_where_its_law_does(context, wants):
    """So that the first step notes; by what the law was told last: of drafts that never held it wants none."""
    times = StepTimes(plain=3.0, plain_cached=6e-4, drafted=3.0, drafted_cached=6e-5, row=0.15, row_cached=6e-5)
    drafting = Drafting(most=12, length=RooflineLength(times), drafter=Pruned(), times=times)
    begun = drafting.started(jnp.int32(12), drafting.laws, jnp.int32(context))
    assert bool(begun.wanted) == wants
    assert not drafting.started(jnp.int32(0), drafting.laws, jnp.int32(context)).wanted  # whose request allows none
    [law] = drafting.laws
    never = law.fitted(times, 1.02, 0.0, PastDrafts(acceptance=0.0, credit=8.0))
    assert not drafting.started(jnp.int32(12), (never,), jnp.int32(context)).wanted


def test_the_mass_is_noted_by_block_where_heads_hold_less():
    """Slot 0 has rows 0, 3 and 4; slot 1 has row 1; slot 2 has rows 2 and 5, the latter of which does not run."""
    rng, layer, plant = np.random.default_rng(1), 1, configuration(model=NARROW).plants[0]
    lengths, slots = np.asarray([21, 40, 9, 22, 23, 0], np.int32), np.asarray([0, 1, 2, 0, 0, 2], np.int32)
    skipped = np.asarray([[2, 0], [1, 9], [0, 1]], np.int32)[slots]  # blocks at the beginning, of each head
    blank = empty(configuration(model=NARROW)).plants[0].cache.layers[layer]
    cached = replace(blank, pages=jnp.asarray(rng.normal(size=blank.pages.shape), jnp.float32))
    tables = np.zeros((3, 16), np.int32)
    tables[:, :8] = 1 + rng.permutation(24).reshape(3, 8)
    tables[1, 8:12] = tables[0, 4:8]
    queries = jnp.asarray(rng.normal(size=(6, NARROW.num_heads, NARROW.head_dim)), jnp.float32)
    length = jnp.asarray(lengths)
    rows = Rows(slot=jnp.asarray(slots), token=jnp.zeros(6, jnp.int32), position=length - 1, run=length > 0)
    chunk = of_rows(rows, jnp.asarray(tables[slots]), length, None)
    recorded_rows = RecordedRows(rows=jnp.asarray([4, 1, 2], jnp.int32), asked=jnp.ones(3, bool))
    reader = FullAttentionLayer(skipped=jnp.asarray(skipped), mass=None, recorded_rows=recorded_rows)
    softmax = NARROW.softmax(layer)
    _, read = reader.read(plant, softmax, queries[:, None], cached, None, chunk)
    assert isinstance(read, LayerReads) and read.block_lse is not None
    share = np.asarray(log_shares(read.block_lse, NARROW.num_kv_heads))
    _, every = read_all(plant, softmax, queries, cached, chunk)
    for number, row in enumerate((4, 1, 2)):
        held, size = -(-int(lengths[row]) // PAGE), NARROW.num_heads // NARROW.num_kv_heads
        for head in range(NARROW.num_kv_heads):
            first = int(skipped[row, head])
            mass = np.exp(np.asarray(every, np.float64)[row, head * size : (head + 1) * size, first:held])
            expected = (mass / mass.sum(axis=1, keepdims=True)).mean(axis=0)
            np.testing.assert_allclose(share[number, head, first:held], np.log(expected), rtol=1e-3, atol=1e-3)
            assert (share[number, head, :first] == NOTHING).all() and (share[number, head, held:] == NOTHING).all()
