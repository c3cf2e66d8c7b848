"""Selectors: each opens the blocks its definition names, found by slower programs; what blocks contribute."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_blocks import GROUP, NUM_BLOCKS, Blocks, blocks, drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import contribution, select
from et_jax.control.bisect import above_threshold, bisection, ordered, radix_search
from et_jax.control.bounds import Interval
from et_jax.control.contribution import influence, relative_influence, token_nll
from et_jax.control.expected_error import ExpectedError, squared_error
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.presets import preset
from et_jax.control.view import attention_entropy, last_mass, likeliest_log_mass, mass
from et_jax.types import replace

many = settings(max_examples=40, deadline=None)
PROPORTIONAL = {
    "top_mass": select.TopMass(),
    "blocks": select.TopBlocks(),
    "certified": select.Certified(),
    "certified by head": select.PerHead(select.Certified(select.box_bounds), AttentionEntropy()),
    "paper influence": select.ActiveSet(alpha=mass),
    "paper mass": select.ActiveSet(contribution.mass, mass),
    "paper value_gauss": select.ActiveSet(contribution.value_gauss, mass),
}
compiled = {name: jax.jit(selector) for name, selector in PROPORTIONAL.items()}
opened_by = jax.jit(lambda selector, view: selector(view))


def box_shares(b: Blocks) -> np.ndarray:
    """Shares of mass with one more key a block, half way from the mean to the greatest score that its box allows."""
    highest = np.where(b.held, np.asarray(b.view.score.high, np.float64), 0.0)
    half_way = 0.5 * (np.where(b.held, np.asarray(b.view.middle, np.float64), 0.0) + highest)
    weight = np.exp(b.mean_log_mass) + np.where(b.held & ~b.tail, np.exp(half_way), 0.0)
    return weight / weight.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", PROPORTIONAL)
@settings(max_examples=12, deadline=None)
@given(b=drawn(spread=200.0, tolerance=(0.0, 0.0)))
@example(b=blocks(0, spread=5000.0, tolerance=0.0))  # some masses are 0 in float32
def test_tolerance_zero_opens_everything(name: str, b: Blocks):
    assert np.all(compiled[name](b.view)[b.held])


@many
@given(drawn(spread=30.0, tolerance=(1e-3, 0.8)))
def test_top_mass_opens_the_fewest_blocks_that_hold_enough(b: Blocks):
    b.assert_fewest(compiled["top_mass"](b.view), b.mean_shares)


@many
@given(drawn(spread=30.0, tolerance=(1e-3, 0.8)))
def test_paper_opens_what_contributes_more_than_the_threshold(b: Blocks):
    share, held, tolerance = b.mean_shares, b.held, float(b.view.tolerance)
    value = np.where(held[:, None], np.asarray(b.view.value_mean, np.float64), 0.0)
    n = np.asarray(b.view.num_tokens, np.float64)[:, None] / int(b.view.num_tokens.sum())
    middle = (n * value).sum(0)
    variance = (n * (value - middle) ** 2).sum(0)
    gauss = 0.5 * ((value - middle) ** 2 / np.maximum(variance, 1e-37)).sum(-1)
    # A single block has no others to stand out from.
    expected = {"paper mass": share, "paper value_gauss": share * (gauss if held.sum() > 1 else 0.0)}
    for name, each in expected.items():
        sure = np.abs(each - tolerance) > 1e-4 * (1 + tolerance)
        plain = sure.all(0) & held
        np.testing.assert_array_equal(np.asarray(compiled[name](b.view))[plain], (each > tolerance).any(0)[plain])


@many
@given(drawn(spread=4.0), st.sampled_from([1, 3, 10, 20]))
def test_quest_opens_the_highest_possible_scores(b: Blocks, num_blocks: int):
    score = np.asarray(b.view.score.high, np.float64).max(0)  # worked out from the boxes by NumPy
    opened = np.asarray(opened_by(select.Quest(num_blocks), b.view))
    assert not np.any(opened & ~b.held)
    assert opened.sum() >= min(num_blocks, b.held.sum())
    if len(np.unique(score[b.held])) == b.held.sum():
        assert opened.sum() == min(num_blocks, b.held.sum())
    closed = b.held & ~opened
    if closed.any():
        assert score[opened].min() > score[closed].max() - 1e-4


@many
@given(drawn(spread=30.0, tolerance=(0.0, 1.0)), st.sampled_from([0, 3]))
def test_top_blocks_opens_the_blocks_of_greatest_share_by_box_and_mean_key(b: Blocks, least: int):
    share, held = box_shares(b).max(0), b.held.sum()
    opened = np.asarray(opened_by(select.TopBlocks(min_blocks=least), b.view))
    count = int(np.ceil((np.float32(1.0) - np.float32(b.view.tolerance)) * np.float32(held)))
    count = max(count, min(least, held))
    assert not np.any(opened & ~b.held)
    assert opened.sum() >= count
    if len(np.unique(np.log(share[b.held]).round(4))) == held:
        assert opened.sum() == max(count, min(held, 1))
    closed = b.held & ~opened
    if closed.any():
        assert np.log(share[opened].min()) > np.log(share[closed].max()) - 1e-4


def test_top_blocks_reads_by_the_least_tolerance_of_the_heads():
    view = blocks(3, tolerance=0.9).view
    heads = jnp.full_like(view.head_tolerance, 0.9).at[1].set(0.25)
    opened = select.TopBlocks()(replace(view, head_tolerance=heads))
    np.testing.assert_array_equal(opened, select.TopBlocks()(blocks(3, tolerance=0.25).view))


def nothing(view):
    return view.start < 0


@many
@given(st.integers(0, 100_000), st.sampled_from([0, 6]), st.sampled_from([0, 7]), st.sampled_from([0, 4]))
def test_guards_open_sinks_window_and_a_minimum_and_nothing_else(seed, sinks, window, min_blocks):
    b = blocks(seed)
    length, held = int(b.view.length), b.held
    wanted = np.zeros(NUM_BLOCKS, bool)
    for position in range(length):
        if position < sinks or position >= length - window:
            wanted[position // 4] = True
    np.testing.assert_array_equal(select.SinksWindow(sinks, window)(b.view) & held, wanted)
    opened = np.asarray(opened_by(select.Guarded(nothing, sinks, window, min_blocks), b.view))
    assert np.all(opened >= wanted)
    assert not np.any(opened & ~held)
    assert opened.sum() == max(wanted.sum(), min(min_blocks, held.sum()))
    extra, likely = opened & ~wanted, b.mean_shares.max(0)
    if extra.any() and (held & ~opened).any():
        assert likely[extra].min() >= likely[held & ~opened].max() * (1 - 1e-5)


BY_LAST = select.ActiveSet(contribution.mass, last_mass)
by_last, by_greater = (jax.jit(one.choose) for one in (BY_LAST, select.ActiveSet(contribution.mass)))


def lasting(view, share, **fields):
    """The view of a sequence whose blocks had these shares of mass when they were last read."""
    return replace(view, last_mass=jnp.asarray(share, jnp.float32), **fields)


@many
@given(seed=st.integers(0, 100_000), theta=st.floats(1e-3, 0.8))
def test_a_block_is_read_by_the_mass_that_it_or_the_one_before_it_had(seed, theta):
    b = blocks(seed, tolerance=theta)
    share = np.random.default_rng(seed).dirichlet(np.full(NUM_BLOCKS, 0.3), b.view.query.shape[0])
    chosen = by_last(lasting(b.view, share))
    moved = np.maximum(share, np.concatenate([np.zeros_like(share[:, :1]), share[:, :-1]], axis=1))
    sure = (np.abs(moved - theta) > 1e-6).all(axis=0)
    np.testing.assert_array_equal(np.asarray(chosen.opened)[sure], ((moved > theta).any(axis=0) & b.held)[sure])
    np.testing.assert_allclose(np.exp(np.asarray(chosen.estimate)), share, rtol=1e-5, atol=1e-30)
    assert chosen.shares
    either = np.maximum(moved, box_shares(b))
    sure = (np.abs(either - theta) > 1e-4).all(axis=0)
    opened = np.asarray(by_greater(lasting(b.view, share)).opened)
    np.testing.assert_array_equal(opened[sure], ((either > theta).any(axis=0) & b.held)[sure])


def test_every_so_many_tokens_all_is_read():
    b = blocks(5, tolerance=0.9)
    for length, looks in ((7, False), (8, True), (9, False), (16, True)):
        view = lasting(b.view, np.full((2, NUM_BLOCKS), 0.01), length=jnp.int32(length))
        opened = np.asarray(replace(BY_LAST, look_every=8)(view))
        assert opened[b.held].all() if looks else not opened.any()


def test_a_minimum_is_filled_by_the_last_masses_where_a_selector_goes_by_them():
    b = blocks(11, tolerance=0.9)
    middle = int(b.held.sum()) // 2
    share = np.full((2, NUM_BLOCKS), 1e-3)
    share[0, middle] = 0.5
    opened = select.Guarded(BY_LAST, sinks=0, window=0, min_blocks=1)(lasting(b.view, share))
    np.testing.assert_array_equal(np.flatnonzero(opened), [middle])


def coded(b: Blocks, **fields):
    """The view with masses known to `apart` nats, half of it either way, and the exact mean scores."""
    exact, apart = jnp.asarray(b.log_mass, jnp.float32), jnp.linspace(0.0, 0.5, NUM_BLOCKS)
    mean = jnp.where(b.held, b.view.middle, 0.0)
    return replace(b.view, coded=Interval(low=exact - apart, high=exact + apart), coded_mean=mean, **fields)


expected_error = jax.jit(ExpectedError().choose)


@settings(max_examples=60, deadline=None)
@given(drawn(spread=20.0, tolerance=(1e-4, 2.0)), st.sampled_from([(0.5, 2.0), (1.0, 0.0), (0.0, 0.0)]))
def test_the_fewest_blocks_are_opened_that_leave_no_head_more_than_its_share(b: Blocks, sensitivity):
    """A block errs by a^2 r^2 2 J / n, J the nats that Jensen's inequality leaves open, in float64 by the formula."""
    seen = coded(b, sensitivity=jnp.asarray(sensitivity, jnp.float32))
    n = np.maximum(np.asarray(b.view.num_tokens, np.float64), 1)
    log_mass, middle = (np.where(b.held, x, 0) for x in (b.log_mass, np.asarray(b.view.middle, np.float64)))
    share = np.exp(b.log_mass - np.logaddexp.reduce(b.log_mass, axis=-1, keepdims=True))
    uneven = np.clip(2 * (log_mass - np.log(n) - middle) / n, 0, 1)
    error = np.where(b.held, share**2 * uneven * np.where(b.held, np.asarray(b.view.value_radius), 0) ** 2, 0.0)
    found = np.asarray(squared_error(seen), np.float64)
    np.testing.assert_allclose(found, error, rtol=2e-3, atol=1e-5)
    chosen = expected_error(seen)
    b.assert_fewest(chosen.opened, np.array(sensitivity)[:, None] * found)
    assert np.all(np.asarray(chosen.upper)[:, b.held] >= b.log_mass[:, b.held])


@pytest.mark.parametrize(("name", "tolerance", "min_blocks"), [("certified", 0.9, 8), ("adaptive", 0.01, 1)])
def test_a_preset_by_8_bit_keys_reads_neither_mean_keys_nor_boxes(name, tolerance, min_blocks):
    b = blocks(14, tolerance=tolerance)  # of nine blocks a selector opens some, and the minimum adds to them
    seen = coded(b, sensitivity=jnp.ones(GROUP))
    unread = {field: jnp.full_like(getattr(seen, field), jnp.nan) for field in ("middle", "key_mean", "key_min")}
    unread |= {"key_max": unread["key_min"], "score": Interval(low=unread["middle"], high=unread["middle"])}
    selector = preset(name, min_blocks=min_blocks, window=0).selector
    assert isinstance(selector, select.Guarded)
    choose = jax.jit(selector.choose)
    jax.tree.map(np.testing.assert_array_equal, choose(replace(seen, **unread)), choose(seen))


# Tolerances of query heads.


@jax.jit
def decided(rule, view):
    return rule(view), likeliest_log_mass(view)


@many
@given(drawn(spread=60.0), st.floats(-3.0, 3.0), st.booleans())
def test_a_head_gets_more_the_more_its_attention_is_spread(b: Blocks, slope: float, has_codes: bool):
    """By the middle of what 8-bit keys allow where there are some, by the mean keys where not; the tail by its own."""
    log_mass = (b.log_mass if has_codes else b.mean_log_mass)[:, b.held]
    share = np.exp(log_mass - np.logaddexp.reduce(log_mass, axis=-1, keepdims=True))
    entropy = -(share * np.log(np.maximum(share, 1e-300))).sum(-1) / np.log(1 + b.held.sum())
    tolerance, likeliest = decided(AttentionEntropy(slope), coded(b) if has_codes else b.view)
    np.testing.assert_allclose(tolerance, 0.1 * np.exp(slope * (entropy - 1)), rtol=2e-4)
    np.testing.assert_allclose(likeliest[:, b.held], log_mass, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(attention_entropy(jnp.zeros((3, 10)), jnp.zeros(10, bool)), 0.0)


RULE = AttentionEntropy(slope=4.0)
adaptive = {name: jax.jit(select.PerHead(PROPORTIONAL[name], RULE)) for name in ("certified", "top_mass", "paper mass")}


@pytest.mark.parametrize("name", adaptive)
@settings(max_examples=15, deadline=None)
@given(b=drawn(spread=8.0, tolerance=(1e-3, 0.5)))
def test_a_selector_opens_what_each_head_would_at_its_own_tolerance(name: str, b: Blocks):
    alone = [compiled[name](b.of_query(head, float(own))) for head, own in enumerate(np.asarray(RULE(b.view)))]
    np.testing.assert_array_equal(adaptive[name](b.view), np.any(alone, axis=0))


# What blocks contribute.


@jax.jit
def both(view):
    share = mass(view)
    return influence(view, share), relative_influence(view, share)


@many
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
    np.testing.assert_allclose(relative * np.linalg.norm(out, axis=-1, keepdims=True), got, rtol=1e-4)


def test_token_nll_weighs_surprisals_by_the_mass():
    b = blocks(7)
    stored = np.linspace(0.5, 5, NUM_BLOCKS)
    got = token_nll(replace(b.view, mean_surprisal=jnp.asarray(stored, jnp.float32)), mass(b.view))
    np.testing.assert_allclose(got, b.mean_shares * stored, rtol=1e-4, atol=1e-6)


# Cuts without a sort, against every cut.

# Few distinct values make ties; of the others every byte of the pattern matters.
FEW = st.sampled_from([-np.inf, -3e30, -2.5, -0.0, 0.0, 0.5, 0.50000006, 7.0, np.inf])
SCORES = hnp.arrays(np.float32, (3, 2, 9), elements=FEW | st.floats(-(2.0**99), 2.0**99, width=32))


def reaching(goal):
    return lambda opened: jnp.sum(opened, axis=-1) >= goal


def cut_by(find):
    return jax.jit(jax.vmap(lambda score, goal: ordered(score) >= find(reaching(goal), ordered(score))[:, None]))


WAYS = [
    *(cut_by(find) for find in (bisection, radix_search)),
    jax.jit(jax.vmap(lambda score, goal: above_threshold(score, reaching(goal)))),
]


@settings(max_examples=80, deadline=None)
@given(SCORES, st.tuples(*[st.integers(0, 11)] * 3))
def test_every_search_cuts_as_high_as_allowed_with_ties_together(score, goals):
    """Of three views at once, each with its own goal."""
    score = np.where(np.abs(score) < 1e-37, 0.0, score).astype(np.float32)  # subnormal numbers count as zero on a CPU
    expected = [
        [row >= max((cut for cut in np.unique(row) if (row >= cut).sum() >= goal), default=-np.inf) for row in view]
        for view, goal in zip(score, goals, strict=True)
    ]
    for opened in WAYS:
        np.testing.assert_array_equal(opened(jnp.asarray(score), jnp.asarray(goals)), expected)
