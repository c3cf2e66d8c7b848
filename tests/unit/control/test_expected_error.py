"""Reading by expected error: the formula, what it expects of values, and what the selector leaves unread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.bounds import Interval
from et_jax.control.expected_error import ExpectedError, squared_error
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.select import PerHead
from et_jax.types import replace

FAMILIES = ("random", "ties", "corners", "needle", "single")  # as the fixture `blocks` draws them
SENSITIVITY = np.array([0.5, 2.0])
drawn = given(
    seed=st.integers(0, 100_000),
    family=st.sampled_from(FAMILIES),
    spread=st.floats(0.01, 20.0),
    tolerance=st.floats(1e-4, 2.0),
)
choose = jax.jit(ExpectedError().choose)


def seen(b):
    """The view with masses known to `apart`, half of it either way, and heads of different sensitivity."""
    exact, apart = jnp.asarray(b.log_mass, jnp.float32), jnp.linspace(0.0, 0.5, b.log_mass.shape[1])
    coded = Interval(low=exact - apart, high=exact + apart)
    return replace(b.view, coded=coded, sensitivity=jnp.asarray(SENSITIVITY, jnp.float32))


def errors(b):
    """Return every block's squared error by the formula, in float64; 0 where none is held."""
    held = np.asarray(b.view.num_tokens) > 0
    n = np.maximum(np.asarray(b.view.num_tokens, np.float64), 1)
    share = np.exp(b.log_mass - np.logaddexp.reduce(b.log_mass, axis=-1, keepdims=True))
    gap = np.where(held, b.log_mass, 0) - np.log(n) - np.where(held, np.asarray(b.view.middle, np.float64), 0)
    uneven = np.clip(2 * gap / n, 0, 1)
    return np.where(held, share**2 * uneven * np.where(held, np.asarray(b.view.value_radius), 0) ** 2, 0.0)


@settings(max_examples=40, deadline=None)
@drawn
def test_the_squared_error_is_its_formula(blocks, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    np.testing.assert_allclose(squared_error(seen(b)), errors(b), rtol=2e-3, atol=1e-5)


def test_values_that_know_nothing_of_the_weights_err_as_much_as_expected():
    """Nearly even weights over n values, each at random at distance r of their mean: a^2 r^2 sum (w - 1/n)^2."""
    rng = np.random.default_rng(0)
    n, width, distance = 16, 8, 3.0
    score = 0.3 * rng.normal(size=n)
    weight = np.exp(score) / np.exp(score).sum()
    gap = np.log(np.exp(score).sum()) - np.log(n) - score.mean()
    value = rng.normal(size=(20_000, n, width))
    value *= distance / np.linalg.norm(value, axis=-1, keepdims=True)
    found = np.square(((weight - 1 / n)[:, None] * value).sum(1)).sum(-1).mean()
    np.testing.assert_allclose(found, distance**2 * np.square(weight - 1 / n).sum(), rtol=0.03)
    np.testing.assert_allclose(found, distance**2 * 2 * gap / n, rtol=0.1)


@settings(max_examples=60, deadline=None)
@drawn
def test_the_fewest_blocks_are_opened_that_leave_no_head_more_than_its_share(blocks, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    opened = np.asarray(choose(seen(b)).opened)
    nats = SENSITIVITY[:, None] * errors(b)
    left = np.where(opened | b.tail(), 0, nats).sum(-1)
    assert np.all(left <= tolerance * (1 + 1e-3) + 1e-6)
    for head, each in enumerate(nats):  # without its least block some head would pass the tolerance
        other = np.where(opened | b.tail(), 0, nats[1 - head]).sum()
        chosen = opened & ~b.tail() & (each > 0)
        if chosen.any() and other == 0 and not np.isclose(each, each[chosen].min(), rtol=1e-3).sum() > 1:
            least = each[chosen].min()
            assert left[head] + least > tolerance * (1 - 1e-3) - 1e-6 or nats[1 - head][chosen].max() > 0


@settings(max_examples=40, deadline=None)
@drawn
def test_what_is_said_of_the_masses_is_certain(blocks, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    held = np.asarray(b.view.num_tokens) > 0
    assert np.all(np.asarray(choose(seen(b)).upper)[:, held] >= b.log_mass[:, held])


def test_heads_alike_open_by_error_alone_and_one_that_does_not_matter_opens_nothing(blocks):
    b = blocks(7, spread=6.0, tolerance=1e-6)
    one = replace(seen(b), sensitivity=jnp.asarray([1.0, 0.0]))
    none = replace(seen(b), sensitivity=jnp.zeros(2))
    np.testing.assert_array_equal(np.asarray(choose(none).opened), b.tail())
    assert np.asarray(choose(one).opened).sum() > 1


def test_at_tolerance_zero_everything_is_read(blocks):
    b = blocks(1, tolerance=0.0)
    assert np.all(np.asarray(choose(seen(b)).opened)[np.asarray(b.view.num_tokens) > 0])


def test_a_rule_of_heads_shares_the_tolerance_out(blocks):
    b = blocks(7, spread=6.0, tolerance=0.05)
    rule = AttentionEntropy(3.0)
    wanted = choose(replace(seen(b), head_tolerance=rule(seen(b)))).opened
    np.testing.assert_array_equal(PerHead(ExpectedError(), rule).choose(seen(b)).opened, wanted)


@pytest.mark.parametrize("missing", ["coded", "sensitivity"])
def test_a_view_that_lacks_what_it_needs_is_refused(blocks, missing):
    with pytest.raises(ValueError, match="no key codes, or no sensitivity"):
        ExpectedError().choose(replace(seen(blocks(0)), **{missing: None}))
