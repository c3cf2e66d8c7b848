"""Tolerances of query heads: attention entropy, the formula, and what a selector makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_blocks import Blocks, blocks, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import contribution, select
from et_jax.control.bounds import Interval
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.view import attention_entropy, likeliest_log_mass, mass
from et_jax.types import replace

many = settings(max_examples=40, deadline=None)


def entropies(log_mass: np.ndarray) -> np.ndarray:
    """Of the masses of blocks, "g n", in float64."""
    share = np.exp(log_mass - np.logaddexp.reduce(log_mass, axis=-1, keepdims=True))
    return -(share * np.log(np.maximum(share, 1e-300))).sum(-1) / np.log(1 + log_mass.shape[-1])


@many
@given(seed=st.integers(0, 100_000), held=st.integers(1, 10), spread=st.sampled_from([0.0, 0.5, 5.0, 60.0]))
def test_attention_entropy_is_its_formula(seed, held, spread):
    log_mass = np.random.default_rng(seed).normal(size=(3, 10)) * spread
    got = entropy_of(jnp.asarray(log_mass, jnp.float32), jnp.arange(10) < held)
    np.testing.assert_allclose(got, entropies(log_mass[:, :held]), atol=1e-5)
    assert np.all(np.asarray(got) >= 0) and np.all(np.asarray(got) < 1)
    np.testing.assert_array_equal(entropy_of(jnp.zeros((3, 10)), jnp.zeros(10, bool)), 0.0)


entropy_of = jax.jit(attention_entropy)


@many
@given(drawn(spread=8.0), st.floats(-3.0, 3.0), st.booleans())
def test_a_head_gets_more_the_more_its_attention_is_spread(b: Blocks, slope: float, coded: bool):
    """By the middle of what 8-bit keys allow where there are some, by the mean keys where not; the tail by its own."""
    view = b.view
    if coded:
        exact, apart = jnp.asarray(b.log_mass, jnp.float32), jnp.linspace(0.0, 0.5, len(b.held))
        view = replace(view, coded=Interval(low=exact - apart, high=exact + apart))
        log_mass = b.log_mass
    else:
        log_mass = b.mean_log_mass
    wanted = 0.1 * np.exp(slope * (entropies(log_mass[:, b.held]) - 1))
    tolerance, likeliest = decided(AttentionEntropy(slope), view)
    np.testing.assert_allclose(tolerance, wanted, rtol=2e-4)
    np.testing.assert_allclose(likeliest[:, b.held], log_mass[:, b.held], rtol=1e-4, atol=1e-4)


@jax.jit
def decided(rule, view):
    return rule(view), likeliest_log_mass(view)


SELECTORS = {
    "certified": select.Certified(),
    "top_mass": select.TopMass(),
    "paper": select.ActiveSet(contribution.mass, mass),
}
RULE = AttentionEntropy(slope=4.0)
adaptive = {name: jax.jit(select.PerHead(selector, RULE)) for name, selector in SELECTORS.items()}
plain = {name: jax.jit(selector) for name, selector in SELECTORS.items()}


@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=15, deadline=None)
@given(b=drawn(spread=8.0, tolerance=(1e-3, 0.5)))
def test_a_selector_opens_what_each_head_would_at_its_own_tolerance(name: str, b: Blocks):
    alone = [plain[name](b.of_query(head, float(own))) for head, own in enumerate(np.asarray(RULE(b.view)))]
    np.testing.assert_array_equal(adaptive[name](b.view), np.any(alone, axis=0))


def test_a_rule_of_another_shape_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"The rule .*one_number.* returns"):
        select.PerHead(select.TopMass(), one_number)(blocks(0).view)


def one_number(view):
    return view.tolerance
