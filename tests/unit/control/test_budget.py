"""What a segment of a prompt reads: budgets against a program of their own, and the faults of the printed version."""

import entropyinfer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.bounds import Interval
from et_jax.control.budget import (
    CertifiedBudget,
    ConstantBudget,
    EntropyBudget,
    EntropyNotes,
    LevelBudget,
    MassBudget,
    greatest,
)
from et_jax.control.controller import Controller
from et_jax.control.segment import Segment, block_entropy, interval, observed

HEADS, GROUP, WIDTH, SEGMENT, BLOCK = 3, 2, 16, 32, 8
SCALE = WIDTH**-0.5
TOKENS = 32


def tensors(number: int, length: int = 8 * SEGMENT, spread: float = 1.0):
    """Queries "k g t d" and keys "k t d" with some structure: a walk, so that near tokens are alike."""
    rng = np.random.default_rng(number)
    q = (
        spread
        * rng.normal(size=(HEADS, GROUP, length, WIDTH)).cumsum(axis=2)
        / np.sqrt(np.arange(1, length + 1))[:, None]
    )
    k = spread * rng.normal(size=(HEADS, length, WIDTH)).cumsum(axis=1) / np.sqrt(np.arange(1, length + 1))[:, None]
    return q.astype(np.float32), k.astype(np.float32)


def segments(q, k, *, layer=1, with_interval=False):
    """Every segment of a prompt, as a budget sees it."""
    num_blocks = k.shape[1] // BLOCK
    cut = k[:, : num_blocks * BLOCK].reshape(HEADS, num_blocks, BLOCK, WIDTH)
    low, high = jnp.asarray(cut.min(axis=2)), jnp.asarray(cut.max(axis=2))
    for s, start in enumerate(range(0, q.shape[2], SEGMENT)):
        part = jnp.asarray(q[:, :, start : start + SEGMENT].transpose(2, 0, 1, 3))
        real = jnp.ones(part.shape[0], bool)
        yield Segment(
            score=observed(part, real, low, high) * SCALE,
            visible=jnp.arange(num_blocks) < start // BLOCK,
            interval=interval(part * SCALE, real, low, high, BLOCK) if with_interval else None,
            index=jnp.int32(s),
            layer=jnp.int32(layer),
            block_size=BLOCK,
            scale=SCALE,
        )


def run(budget, q, k):
    """The blocks opened, "k s n"."""
    kept, opened = budget.started(HEADS), []
    choose = jax.jit(budget.choose)
    for segment in segments(q, k, with_interval=budget.needs_interval):
        chosen, kept = choose(segment, kept)
        opened.append(np.asarray(chosen))
    return np.stack(opened, axis=1)


@pytest.mark.parametrize("length", [8 * SEGMENT, 5 * SEGMENT + 13])
def test_the_observation_is_that_of_the_paper(length):
    q, k = tensors(0, length)
    wanted = entropyinfer.observation(q, k, SEGMENT, BLOCK) * SCALE
    got = np.stack([segment.score for segment in segments(q, k)], axis=1)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_queries_past_the_end_of_a_segment_are_not_observed():
    q, k = tensors(1, SEGMENT)
    low, high = (jnp.asarray(f(k.reshape(HEADS, -1, BLOCK, WIDTH), axis=2)) for f in (np.min, np.max))
    part = jnp.asarray(q.transpose(2, 0, 1, 3))
    real = jnp.arange(SEGMENT) < 10
    for filler in (99.0, -99.0):
        np.testing.assert_array_equal(
            observed(part.at[10:].set(filler), real, low, high), observed(part[:10], real[:10], low, high)
        )
    np.testing.assert_array_equal(observed(part, real & False, low, high), 0.0)


@pytest.mark.parametrize("printed", [True, False])
def test_entropies_are_those_of_the_paper_and_of_the_sound_version(printed):
    q, k = tensors(2)
    scores = entropyinfer.observation(q, k, SEGMENT, BLOCK)
    wanted = entropyinfer.entropies(scores, SEGMENT, BLOCK, printed=printed, scale=SCALE)
    got = np.stack([block_entropy(segment, printed=printed) for segment in segments(q, k)], axis=1)
    # a share may be rounded to the one bfloat16 or the other
    np.testing.assert_allclose(got[:, 1:], wanted[:, 1:], atol=2e-2 if printed else 1e-5)


@pytest.mark.parametrize(("count", "entropy"), [(0, 0.0), (1, 0.0), (2, 1.0), (5, 1.0)])
def test_attention_spread_evenly_has_entropy_one(count, entropy):
    segment = Segment(
        score=jnp.full((1, 6), 3.0),
        visible=jnp.arange(6) < count,
        interval=None,
        index=jnp.int32(1),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=1.0,
    )
    assert float(block_entropy(segment)[0]) == pytest.approx(entropy, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 6.0, width=32), min_size=2, max_size=12),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.floats(0.1, 1.0),
    st.floats(1.0, 4.0),
)
def test_the_recursion_is_that_of_the_paper(entropy, gain, threshold, floor, cap):
    law = EntropyBudget(tokens=TOKENS, gain=gain, threshold=threshold, floor=floor, cap=cap)
    wanted = entropyinfer.budgets(np.asarray([entropy]), TOKENS, gain=gain, threshold=threshold, floor=floor, cap=cap)
    notes = law.started(1)
    for s, each in enumerate(entropy[1:], 1):
        notes = law.updated(jnp.asarray([each], jnp.float32), notes)
        np.testing.assert_allclose(notes.tokens[0], wanted[0, s], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize("number", range(3))
def test_the_blocks_read_are_those_of_the_paper(printed, number):
    q, k = tensors(number, spread=2.0)
    law = EntropyBudget(tokens=TOKENS, printed=printed, floor=0.25)
    scores = entropyinfer.observation(q, k, SEGMENT, BLOCK)
    entropy = entropyinfer.entropies(scores, SEGMENT, BLOCK, printed=printed, scale=SCALE)
    tokens = entropyinfer.budgets(entropy, TOKENS, gain=0.5, threshold=0.4, floor=0.25, cap=3.0)
    tokens = np.where(entropyinfer.rigid(entropy, 1e-5, online=True), TOKENS, tokens)
    # a budget within rounding of a whole number of blocks may fall on either side of it
    fewer, more = (np.floor((tokens + off) / BLOCK) for off in (-0.05, 0.05))
    got, wanted = run(law, q, k), entropyinfer.best_blocks(scores, np.floor(tokens / BLOCK), SEGMENT, BLOCK)
    sure = fewer == more
    assert sure[:, 1:].mean() > 0.5 and len(np.unique(tokens)) > 3
    np.testing.assert_array_equal(got[sure], wanted[sure])


def test_a_head_is_rigid_until_a_segment_shows_otherwise():
    law = EntropyBudget(tokens=TOKENS, floor=0.25, rigid_below=0.1)
    entropy = np.asarray([[9.0, 0.05, 0.05, 0.05, 0.5, 0.05]])
    notes, given = law.started(1), []
    for each in entropy[0, 1:]:
        notes = law.updated(jnp.asarray([each], jnp.float32), notes)
        given.append(bool(notes.rigid[0]))
    assert given == entropyinfer.rigid(entropy, 0.1, online=True)[0, 1:].tolist() == [True, True, True, False, False]
    assert not entropyinfer.rigid(entropy, 0.1, online=False).any()


def test_nothing_is_learnt_of_a_segment_with_nothing_before_it():
    q, k = tensors(3)
    law = EntropyBudget(tokens=TOKENS)
    first = next(segments(q, k))
    opened, notes = law.choose(first, law.started(HEADS))
    assert not opened.any()
    for got, wanted in zip(jax.tree.leaves(notes), jax.tree.leaves(law.started(HEADS)), strict=True):
        np.testing.assert_array_equal(got, wanted)


# Faults of the printed version, each beside the sound one.


def test_unscaled_scores_make_attention_look_sharp():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(HEADS, 64)).astype(np.float32) * np.sqrt(128)
    segment = Segment(
        score=jnp.asarray(scores * 128**-0.5),
        visible=jnp.ones(64, bool),
        interval=None,
        index=jnp.int32(1),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=128**-0.5,
    )
    printed = np.asarray(block_entropy(segment, printed=True)) / np.log(64)
    sound = np.asarray(block_entropy(segment))
    assert np.all(printed < 0.35) and np.all(sound > 0.85)


@pytest.mark.parametrize(("gap", "rigid"), [(7.0, False), (12.0, False), (17.5, True)])
def test_a_head_is_rigid_only_where_one_block_takes_all(gap, rigid):
    """Below 1e-5 nats: where the three other blocks hold less than a millionth of the mass together."""
    segment = Segment(
        score=jnp.zeros((1, 4)).at[0, 0].set(gap),
        visible=jnp.ones(4, bool),
        interval=None,
        index=jnp.int32(1),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=1.0,
    )
    other = np.exp(-gap) / (1 + 3 * np.exp(-gap))
    exact = -(3 * other * np.log(other) + (1 - 3 * other) * np.log(1 - 3 * other))
    assert float(block_entropy(segment)[0]) * np.log(4) == pytest.approx(exact, rel=1e-3, abs=1e-6)
    share = np.asarray([1 - 3 * other, other, other, other]).astype(ml_dtypes.bfloat16).astype(np.float64)
    rounded = -(share * np.log(share + 1e-9)).sum()
    assert float(block_entropy(segment, printed=True)[0]) == pytest.approx(rounded, rel=0.02, abs=1e-7)
    for printed in (True, False):
        law = EntropyBudget(tokens=TOKENS, printed=printed)
        assert bool(law.choose(segment, law.started(1))[1].rigid[0]) == rigid


def test_the_largest_budget_of_a_layer_is_given_to_every_head():
    q, k = tensors(0, spread=2.0)
    own = run(EntropyBudget(tokens=TOKENS, floor=0.25), q, k).sum(axis=2)
    shared = run(EntropyBudget(tokens=TOKENS, floor=0.25, shared=True), q, k).sum(axis=2)
    np.testing.assert_array_equal(shared, np.broadcast_to(own.max(axis=0), own.shape))
    assert (own < shared).any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 6.0, width=32), min_size=2, max_size=12))
def test_as_printed_entropy_only_adds_blocks(entropy):
    printed, free = EntropyBudget(tokens=TOKENS), EntropyBudget(tokens=TOKENS, floor=0.1)
    notes = printed.started(1), free.started(1)
    for each in entropy:
        at = jnp.asarray([each], jnp.float32)
        notes = printed.updated(at, notes[0]), free.updated(at, notes[1])
        assert notes[0].tokens[0] >= TOKENS
        assert notes[1].tokens[0] >= 0.1 * TOKENS - 1e-3
    falling = EntropyNotes(
        entropy=jnp.ones(1), tokens=jnp.full(1, float(TOKENS)), rigid=jnp.zeros(1, bool), begun=jnp.ones(1, bool)
    )
    assert free.updated(jnp.asarray([0.5]), falling).tokens[0] == pytest.approx(0.8 * TOKENS)


# What it is compared with.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 12))
def test_the_greatest_are_opened_and_nothing_that_is_not_visible(seed, count):
    rng = np.random.default_rng(seed)
    score, visible = rng.normal(size=(2, 10)).astype(np.float32), np.arange(10) < rng.integers(0, 11)
    got = np.asarray(greatest(jnp.asarray(score), jnp.asarray([count, 1]), jnp.asarray(visible)))
    for row, number in ((0, count), (1, 1)):
        ranked = [j for j in np.argsort(-score[row]) if visible[j]][:number]
        np.testing.assert_array_equal(np.flatnonzero(got[row]), np.sort(ranked))


def test_a_constant_budget_is_the_same_for_all_heads_and_segments():
    q, k = tensors(4)
    got = run(ConstantBudget(tokens=20), q, k).sum(axis=2)
    np.testing.assert_array_equal(got[:, 0], 0)
    np.testing.assert_array_equal(got[:, 1:], 20 // BLOCK)


def test_a_level_gives_spread_heads_more_blocks():
    """One head looks at a single block, one at four alike, one at all sixteen alike."""
    score = np.full((3, 16), -1e4, np.float32)
    score[0, 5], score[1, 3:7], score[2] = 0.0, 0.0, 0.0
    segment = Segment(
        score=jnp.asarray(score),
        visible=jnp.ones(16, bool),
        interval=None,
        index=jnp.int32(1),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=SCALE,
    )
    opened = np.asarray(LevelBudget(tokens=8 * BLOCK, segment=SEGMENT).choose(segment, {})[0])
    np.testing.assert_array_equal(opened.sum(axis=1), [0, 4, 16])  # H is 0, log 4 / log 16, 1; ties go together
    np.testing.assert_array_equal(np.flatnonzero(opened[1]), [3, 4, 5, 6])


def test_mass_takes_the_fewest_blocks_that_hold_it():
    q, k = tensors(5, spread=2.0)
    scores = entropyinfer.observation(q, k, SEGMENT, BLOCK) * SCALE
    share = entropyinfer.shares(scores, SEGMENT, BLOCK)
    got = run(MassBudget(left=0.1), q, k)
    for head in range(HEADS):
        for s in range(1, share.shape[1]):
            ranked = np.sort(share[head, s])[::-1]
            fewest = 1 + np.flatnonzero(1 - np.cumsum(ranked) <= 0.1)[0]
            assert got[head, s].sum() == fewest
            assert share[head, s][got[head, s]].min() >= ranked[fewest - 1] - 1e-6


def test_intervals_hold_every_score_of_their_queries_and_keys():
    q, k = tensors(6, 3 * SEGMENT)
    for s, segment in enumerate(segments(q, k, with_interval=True)):
        part = q[:, :, s * SEGMENT : (s + 1) * SEGMENT] * SCALE
        exact = np.einsum("kgtd,kud->kgtu", part, k).reshape(HEADS, GROUP, -1, BLOCK, k.shape[1] // BLOCK, BLOCK)
        low = exact.min(axis=(3, 5)).transpose(0, 2, 1, 3).reshape(HEADS, -1, k.shape[1] // BLOCK)
        high = exact.max(axis=(3, 5)).transpose(0, 2, 1, 3).reshape(HEADS, -1, k.shape[1] // BLOCK)
        assert segment.interval is not None
        assert np.all(segment.interval.low <= low + 1e-4) and np.all(segment.interval.high >= high - 1e-4)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_a_certificate_holds_for_every_query(spread):
    q, k = tensors(7, spread=spread)
    # a few blocks of keys that every query looks at
    k[:, :BLOCK] = 40.0 * q.mean(axis=(1, 2))[:, None]
    opened = run(CertifiedBudget(left=0.05), q, k)
    for s in range(1, opened.shape[1]):
        start = s * SEGMENT
        score = np.einsum("kgtd,kud->kgtu", q[:, :, start : start + SEGMENT].astype(np.float64), k[:, :start]) * SCALE
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        by_block = weight.reshape(HEADS, GROUP, SEGMENT, -1, BLOCK).sum(axis=-1)
        left = np.where(opened[:, None, None, s, : start // BLOCK], 0.0, by_block).sum(axis=-1)
        assert np.all(left <= 0.05 * by_block.sum(axis=-1) + 1e-9)


def test_a_certificate_can_be_had_where_a_block_stands_out():
    segment = Segment(
        score=jnp.zeros((1, 4)),
        visible=jnp.arange(4) < 3,
        interval=Interval(low=jnp.asarray([[[9.0, 0.0, 0.0, 0.0]]]), high=jnp.asarray([[[9.5, 1.0, 1.0, 99.0]]])),
        index=jnp.int32(1),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=1.0,
    )
    opened, _ = CertifiedBudget(left=0.01).choose(segment, {})
    np.testing.assert_array_equal(opened, [[True, False, False, False]])
    opened, _ = CertifiedBudget(left=1e-6).choose(segment, {})
    np.testing.assert_array_equal(opened, [[True, True, True, False]])


def test_a_group_of_no_queries_asks_for_nothing():
    q, k = tensors(8, SEGMENT)
    low, high = (jnp.asarray(f(k.reshape(HEADS, -1, BLOCK, WIDTH), axis=2)) for f in (np.min, np.max))
    part = jnp.asarray(q.transpose(2, 0, 1, 3))
    got = interval(part, jnp.arange(SEGMENT) < BLOCK, low, high, BLOCK).high.reshape(HEADS, SEGMENT // BLOCK, -1)
    assert np.all(got[:, 0] > -1e6) and np.all(got[:, 1:] < -1e30)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ConstantBudget(tokens=0), "tokens is 0; it must be at least 1"),
        (lambda: EntropyBudget(floor=0.0), "floor is 0.0; it must be above 0 and at most 1"),
        (lambda: EntropyBudget(cap=0.5), "cap is 0.5"),
        (lambda: EntropyBudget(gain=float("nan")), "gain is nan"),
        (lambda: EntropyBudget(segment=0), "segment is 0; it must be at least 1"),
        (lambda: MassBudget(left=1.0), "left is 1.0; it must be from 0 to below 1"),
        (lambda: CertifiedBudget(left=-0.1), "left is -0.1"),
        (lambda: MassBudget(dense_layers=-1), "dense_layers is -1"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_controller_takes_a_budget_and_nothing_else():
    with pytest.raises((ValueError, TypeError), match="budget"):
        Controller(budget=5)  # type: ignore[arg-type]
    assert Controller(budget=ConstantBudget()).budget == ConstantBudget()
