"""Tolerances of query heads: the formula, what a selector makes of them, and what each head is promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import contribution, select
from et_jax.control.bounds import Interval
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.view import attention_entropy, likeliest_log_mass, mass
from et_jax.types import replace

FAMILIES = ("random", "ties", "corners", "needle", "single")  # as the fixture `blocks` draws them
many = settings(max_examples=40, deadline=None)


def entropies(log_mass: np.ndarray) -> np.ndarray:
    """Of the masses of the blocks held, "g n", in float64."""
    share = np.exp(log_mass - np.logaddexp.reduce(log_mass, axis=-1, keepdims=True))
    return -(share * np.log(np.maximum(share, 1e-300))).sum(-1) / np.log(1 + log_mass.shape[-1])


@many
@given(seed=st.integers(0, 100_000), held=st.integers(1, 10), spread=st.floats(0.0, 60.0))
def test_attention_entropy_is_its_formula(seed, held, spread):
    log_mass = np.random.default_rng(seed).normal(size=(3, 10)) * spread
    got = attention_entropy(jnp.asarray(log_mass, jnp.float32), jnp.arange(10) < held)
    np.testing.assert_allclose(got, entropies(log_mass[:, :held]), atol=1e-5)
    assert np.all(np.asarray(got) >= 0) and np.all(np.asarray(got) < 1)


def test_attention_that_is_even_has_the_most_and_one_block_has_none():
    even = jnp.zeros((1, 8))
    np.testing.assert_allclose(attention_entropy(even, jnp.ones(8, bool)), np.log(8) / np.log(9), rtol=1e-6)
    np.testing.assert_allclose(attention_entropy(even, jnp.arange(8) < 1), 0.0, atol=1e-7)
    np.testing.assert_array_equal(attention_entropy(even, jnp.zeros(8, bool)), [0.0])


@many
@given(
    seed=st.integers(0, 100_000),
    family=st.sampled_from(FAMILIES),
    slope=st.floats(-3.0, 3.0),
    coded=st.booleans(),
)
def test_a_head_gets_more_the_more_its_attention_is_spread(blocks, seed, family, slope, coded):
    """By the middle of what 8-bit keys allow where there are some, by the mean keys where not; the tail by its own."""
    b = blocks(seed, family, tolerance=0.1)
    held = np.asarray(b.view.num_tokens) > 0
    view = b.view
    if coded:
        exact, apart = jnp.asarray(b.log_mass, jnp.float32), jnp.linspace(0.0, 0.5, len(held))
        view = replace(view, coded=Interval(low=exact - apart, high=exact + apart))
        log_mass = b.log_mass
    else:
        score = np.asarray(view.query, np.float64) @ np.asarray(view.key_mean, np.float64).T
        with np.errstate(divide="ignore"):
            log_mass = np.where(b.tail(), b.log_mass, np.log(np.asarray(view.num_tokens)) + score)
    wanted = 0.1 * np.exp(slope * (entropies(log_mass[:, held]) - 1))
    np.testing.assert_allclose(AttentionEntropy(slope)(view), wanted, rtol=2e-4)
    np.testing.assert_allclose(likeliest_log_mass(view)[:, held], log_mass[:, held], rtol=1e-4, atol=1e-4)


SELECTORS = {
    "certified": select.Certified(),
    "certified box": select.Certified(select.box_bounds),
    "top_mass": select.TopMass(),
    "paper": select.ActiveSet(contribution.mass, mass),
}
RULE = AttentionEntropy(slope=4.0)
adaptive = {name: jax.jit(select.PerHead(selector, RULE)) for name, selector in SELECTORS.items()}
plain = {name: jax.jit(selector) for name, selector in SELECTORS.items()}


@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000), family=st.sampled_from(FAMILIES), tolerance=st.floats(1e-3, 0.5))
def test_a_selector_opens_what_each_head_would_at_its_own_tolerance(blocks, name, seed, family, tolerance):
    b = blocks(seed, family, 8.0, tolerance)
    wanted = np.zeros(len(b.view.start), bool)
    for head, own in enumerate(np.asarray(RULE(b.view))):
        view = b.tolerating(float(own))
        fields = ("query", "middle", "head_tolerance", "tail_log_mass")
        alone = {field: getattr(view, field)[head : head + 1] for field in fields}
        score = Interval(low=view.score.low[head : head + 1], high=view.score.high[head : head + 1])
        wanted |= np.asarray(plain[name](replace(view, score=score, **alone)))
    np.testing.assert_array_equal(adaptive[name](b.view), wanted)


@pytest.mark.parametrize("name", ["certified", "certified box"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    family=st.sampled_from(FAMILIES),
    spread=st.floats(0.01, 40.0),
    tolerance=st.floats(1e-3, 0.9),
)
def test_no_head_leaves_more_unread_than_its_own_tolerance(blocks, name, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    own = np.asarray(RULE(b.view), np.float64)
    assert np.all(b.unread(adaptive[name](b.view)) <= own * (1 + 1e-5)) and np.all(own <= tolerance)


def test_a_rule_of_another_shape_is_refused_in_a_sentence(blocks):
    with pytest.raises(ValueError, match=r"The rule .*one_number.* returns"):
        select.PerHead(select.TopMass(), one_number)(blocks(0).view)


def one_number(view):
    return view.tolerance


def test_at_tolerance_zero_everything_is_read(blocks):
    b = blocks(1, tolerance=0.0)
    for name, selector in adaptive.items():
        assert np.all(np.asarray(selector(b.view))[np.asarray(b.view.num_tokens) > 0]), name
