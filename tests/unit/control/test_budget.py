"""What a segment of a prompt reads: budgets against an independent program."""

import entropyinfer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.budget import ConstantBudget, EntropyBudget, LevelBudget, MassBudget
from et_jax.control.segment import Segment, block_entropy, observed
from et_jax.types import replace

HEADS, GROUP, WIDTH, SEGMENT, BLOCK = 3, 2, 16, 32, 8
SCALE = WIDTH**-0.5
TOKENS = 32


def tensors(number: int, length: int = 8 * SEGMENT, spread: float = 1.0):
    """Queries "k g t d" and keys "k t d" with some structure: a walk, so that near tokens are alike."""
    rng, size = np.random.default_rng(number), spread / np.sqrt(np.arange(1, length + 1))[:, None]
    walks = (rng.normal(size=(*lead, length, WIDTH)).cumsum(axis=-2) for lead in ((HEADS, GROUP), (HEADS,)))
    return [(size * walk).astype(np.float32) for walk in walks]


def segment_of(score, visible=None, index: int = 1, scale: float = 1.0) -> Segment:
    """A segment of these scores; all blocks are visible unless it says which."""
    score = jnp.asarray(score, jnp.float32)
    return Segment(
        score=score,
        visible=jnp.ones(score.shape[1], bool) if visible is None else jnp.asarray(visible),
        index=jnp.int32(index),
        layer=jnp.int32(1),
        block_size=BLOCK,
        scale=scale,
    )


def ends(k):
    """The least and the greatest of every channel in each block of keys."""
    num_blocks = k.shape[1] // BLOCK
    cut = k[:, : num_blocks * BLOCK].reshape(HEADS, num_blocks, BLOCK, WIDTH)
    return jnp.asarray(cut.min(axis=2)), jnp.asarray(cut.max(axis=2))


def segments(q, k):
    """Every segment of a prompt, as a budget sees it."""
    low, high = ends(k)
    for s, start in enumerate(range(0, q.shape[2], SEGMENT)):
        part = jnp.asarray(q[:, :, start : start + SEGMENT].transpose(2, 0, 1, 3))
        real = jnp.ones(part.shape[0], bool)
        yield segment_of(
            seen(part, real, low, high) * SCALE,
            np.arange(low.shape[1]) < start // BLOCK,
            index=s,
            scale=SCALE,
        )


seen = jax.jit(observed)


def run(budget, q, k):
    """The blocks opened, "k s n"."""
    kept, opened = budget.started(HEADS), []
    choose = jax.jit(budget.choose)
    for segment in segments(q, k):
        chosen, kept = choose(segment, kept)
        opened.append(np.asarray(chosen))
    return np.stack(opened, axis=1)


def test_queries_past_the_end_of_a_segment_are_not_observed():
    q, k = tensors(1, SEGMENT)
    part, low_high = jnp.asarray(q.transpose(2, 0, 1, 3)), ends(k)
    real = jnp.arange(SEGMENT) < 10
    expected = observed(part[:10], real[:10], *low_high)
    for filler in (99.0, -99.0):
        np.testing.assert_array_equal(observed(part.at[10:].set(filler), real, *low_high), expected)
    np.testing.assert_array_equal(observed(part, real & False, *low_high), 0.0)


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize(
    ("length", "numbers"),
    [
        (8 * SEGMENT, {"gain": 0.5, "threshold": 0.4, "floor": 0.25, "cap": 3.0}),
        (15 * SEGMENT + 13, {"gain": 1.5, "threshold": 0.1, "floor": 0.5, "cap": 1.5}),
    ],
)
def test_observations_entropies_and_the_blocks_read_are_those_of_the_paper_and_of_the_sound_version(
    printed, length, numbers
):
    q, k = tensors(0, length, spread=2.0)
    law = EntropyBudget(tokens=TOKENS, printed=printed, **numbers)
    scores = entropyinfer.observation(q, k, SEGMENT, BLOCK)
    entropy = entropyinfer.entropies(scores, SEGMENT, BLOCK, printed=printed, scale=SCALE)
    parts = list(segments(q, k))
    np.testing.assert_allclose(np.stack([x.score for x in parts], axis=1), scores * SCALE, rtol=1e-5, atol=1e-5)
    got = np.stack([block_entropy(x, printed=printed) for x in parts], axis=1)
    # a share may be rounded to the one bfloat16 or the other
    np.testing.assert_allclose(got[:, 1:], entropy[:, 1:], atol=2e-2 if printed else 1e-5)
    tokens = entropyinfer.budgets(entropy, TOKENS, **numbers)
    tokens = np.where(entropyinfer.rigid(entropy, 1e-5, online=True), TOKENS, tokens)
    # a budget within rounding of a whole number of blocks may fall on either side of it
    fewer, more = (np.floor((tokens + off) / BLOCK) for off in (-0.05, 0.05))
    got, wanted = run(law, q, k), entropyinfer.best_blocks(scores, np.floor(tokens / BLOCK), SEGMENT, BLOCK)
    sure = fewer == more
    assert sure[:, 1:].mean() > 0.5 and len(np.unique(tokens)) > 3
    np.testing.assert_array_equal(got[sure], wanted[sure])


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize(("gap", "rigid"), [(0.0, False), (12.0, False), (17.5, True)])
def test_a_head_is_rigid_and_gets_the_first_budget_only_where_one_block_takes_all(printed, gap, rigid):
    """Below 1e-5 nats: where the three other blocks have less than a millionth of the mass together."""
    segment = segment_of([[gap, 0.0, 0.0, 0.0]])
    law = EntropyBudget(tokens=TOKENS, printed=printed)
    before = replace(law.started(1), entropy=jnp.full(1, 9.0), tokens=jnp.full(1, 60.0), begun=jnp.ones(1, bool))
    tokens, after = law.given(segment, before)
    assert bool(after.rigid[0]) == rigid
    assert float(tokens[0]) == pytest.approx(TOKENS if rigid else 60.0 - 0.5 * 0.4 * TOKENS)
    alone = segment_of([[gap, 0.0, 0.0, 0.0]], visible=[False, True, False, False])
    assert float(block_entropy(alone)[0]) == pytest.approx(0.0, abs=1e-6)


def test_the_largest_budget_of_a_layer_is_given_to_every_head_where_they_share():
    q, k = tensors(0, spread=2.0)
    own = run(EntropyBudget(tokens=TOKENS, floor=0.25), q, k).sum(axis=2)
    shared = run(EntropyBudget(tokens=TOKENS, floor=0.25, shared=True), q, k).sum(axis=2)
    np.testing.assert_array_equal(shared, np.broadcast_to(own.max(axis=0), own.shape))
    assert (own < shared).any()


# What it is compared with.


def test_a_constant_budget_is_the_same_for_all_heads_and_a_level_gives_spread_heads_more_blocks():
    """One head attends to a single block, one to four alike, one to all sixteen alike; ties open together."""
    score = np.full((3, 16), -1e4, np.float32)
    score[0, 5], score[1, 3:7], score[2] = 0.0, 0.0, 0.0
    opened = np.asarray(LevelBudget(tokens=8 * BLOCK, segment=SEGMENT).choose(segment_of(score), {})[0])
    np.testing.assert_array_equal(opened.sum(axis=1), [0, 4, 16])  # H is 0, log 4 / log 16, 1
    np.testing.assert_array_equal(np.flatnonzero(opened[1]), [3, 4, 5, 6])
    constant, _ = ConstantBudget(tokens=20).choose(segment_of(np.random.default_rng(0).normal(size=(3, 16))), {})
    np.testing.assert_array_equal(constant.sum(axis=1), 20 // BLOCK)


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
