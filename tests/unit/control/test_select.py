"""Selectors: each opens the blocks its definition names, found by slower programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_blocks import NUM_BLOCKS, Blocks, blocks, drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import contribution, select, view
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.view import last_mass, mass
from et_jax.types import replace

many = settings(max_examples=40, deadline=None)
PROPORTIONAL = {
    "top_mass": select.TopMass(),
    "certified": select.Certified(),
    "certified by head": select.PerHead(select.Certified(select.box_bounds), AttentionEntropy()),
    "paper influence": select.ActiveSet(alpha=mass),
    "paper mass": select.ActiveSet(contribution.mass, mass),
    "paper value_gauss": select.ActiveSet(contribution.value_gauss, mass),
}
compiled = {name: jax.jit(selector) for name, selector in PROPORTIONAL.items()}


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
    opened = np.asarray(QUEST[num_blocks](b.view))
    assert not np.any(opened & ~b.held)
    assert opened.sum() >= min(num_blocks, b.held.sum())
    if len(np.unique(score[b.held])) == b.held.sum():
        assert opened.sum() == min(num_blocks, b.held.sum())
    closed = b.held & ~opened
    if closed.any():
        assert score[opened].min() > score[closed].max() - 1e-4


QUEST = {n: jax.jit(select.Quest(n)) for n in (1, 3, 10, 20)}


def nothing(view):
    return jnp.zeros(view.start.shape, bool)


@many
@given(
    seed=st.integers(0, 100_000),
    sinks=st.sampled_from([0, 6]),
    window=st.sampled_from([0, 7]),
    min_blocks=st.sampled_from([0, 4]),
)
def test_guards_open_sinks_window_and_a_minimum_and_nothing_else(seed, sinks, window, min_blocks):
    b = blocks(seed)
    length, held = int(b.view.length), b.held
    wanted = np.zeros(NUM_BLOCKS, bool)
    for position in range(length):
        if position < sinks or position >= length - window:
            wanted[position // 4] = True
    np.testing.assert_array_equal(select.SinksWindow(sinks, window)(b.view) & held, wanted)
    opened = np.asarray(GUARDED[sinks, window, min_blocks](b.view))
    assert np.all(opened >= wanted)
    assert not np.any(opened & ~held)
    assert opened.sum() == max(wanted.sum(), min(min_blocks, held.sum()))
    extra, likely = opened & ~wanted, b.mean_shares.max(0)
    if extra.any() and (held & ~opened).any():
        assert likely[extra].min() >= likely[held & ~opened].max() * (1 - 1e-5)


GUARDED = {
    (sinks, window, least): jax.jit(select.Guarded(nothing, sinks, window, least))
    for sinks in (0, 6)
    for window in (0, 7)
    for least in (0, 4)
}


def test_guards_only_add_and_a_dense_selector_reads_all():
    b = blocks(11, tolerance=0.4)
    inner = np.asarray(compiled["certified"](b.view)) & b.held
    assert np.all(np.asarray(select.Guarded(PROPORTIONAL["certified"])(b.view)) >= inner)
    assert select.Guarded(select.Dense()).reads_all and np.all(select.Dense()(b.view))
    assert not select.Guarded(select.Quest(2)).reads_all and not select.SinksWindow().reads_all


def lasting(view, share, length=None):
    """The view of a sequence whose blocks had these shares of mass when they were last read."""
    view = replace(view, last_mass=jnp.asarray(share, jnp.float32))
    return view if length is None else replace(view, length=jnp.asarray(length, jnp.int32))


@many
@given(seed=st.integers(0, 100_000), theta=st.floats(1e-3, 0.8))
def test_a_block_is_read_by_the_mass_that_it_or_the_one_before_it_had(seed, theta):
    b = blocks(seed, tolerance=theta)
    share = np.random.default_rng(seed).dirichlet(np.full(NUM_BLOCKS, 0.3), b.view.query.shape[0])
    chosen = LASTING(lasting(b.view, share))
    moved = np.maximum(share, np.concatenate([np.zeros_like(share[:, :1]), share[:, :-1]], axis=1))
    sure = (np.abs(moved - theta) > 1e-6).all(axis=0)
    np.testing.assert_array_equal(np.asarray(chosen.opened)[sure], ((moved > theta).any(axis=0) & b.held)[sure])
    np.testing.assert_allclose(np.exp(np.asarray(chosen.estimate)), share, rtol=1e-5, atol=1e-30)
    assert chosen.shares
    either = np.maximum(moved, box_shares(b))
    sure = (np.abs(either - theta) > 1e-4).all(axis=0)
    opened = np.asarray(GREATER(lasting(b.view, share)).opened)
    np.testing.assert_array_equal(opened[sure], ((either > theta).any(axis=0) & b.held)[sure])


def test_every_so_many_tokens_all_is_read():
    b = blocks(5, tolerance=0.9)
    for length, looks in ((7, False), (8, True), (9, False), (16, True)):
        opened = np.asarray(LOOKING(lasting(b.view, np.full((2, NUM_BLOCKS), 0.01), length)).opened)
        assert opened[b.held].all() if looks else not opened.any()


def test_a_minimum_is_filled_by_the_last_masses_where_a_selector_goes_by_them():
    b = blocks(11, tolerance=0.9)
    middle = int(b.held.sum()) // 2
    share = np.full((2, NUM_BLOCKS), 1e-3)
    share[0, middle] = 0.5
    guarded = select.Guarded(select.ActiveSet(contribution.mass, last_mass), sinks=0, window=0, min_blocks=1)
    np.testing.assert_array_equal(np.flatnonzero(guarded(lasting(b.view, share))), [middle])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"look_every": 0}, "look_every is 0; it must be at least 1, or None"),
        ({"look_every": -1}, "look_every is -1"),
        ({"alpha": lambda view, share: share}, "alpha must be a function of a view"),
        ({"contribution": lambda view: view.middle}, "a function of a view and the share of mass in each block"),
    ],
)
def test_an_active_set_refuses_what_it_cannot_use(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        select.ActiveSet(**given)


@pytest.mark.parametrize(
    ("asks", "sentence"),
    [
        (select.coded_bounds, "no key codes"),
        (view.coded_mass, "no key codes"),
        (view.last_mass, "no last masses"),
        (lambda view: contribution.token_nll(view, mass(view)), "no surprisals"),
        (ExpectedError(), "no key codes, or no sensitivity"),
    ],
)
def test_a_view_that_lacks_what_is_asked_for_is_refused(asks, sentence):
    with pytest.raises(ValueError, match=sentence):
        asks(blocks(0).view)


LASTING = jax.jit(select.ActiveSet(contribution.mass, last_mass).choose)
GREATER = jax.jit(select.ActiveSet(contribution.mass).choose)
LOOKING = jax.jit(select.ActiveSet(contribution.mass, last_mass, look_every=8).choose)
