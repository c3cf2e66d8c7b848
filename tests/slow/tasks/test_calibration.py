"""Calibration: the fitted temperature is where a slow search in float64 finds the least loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import log_softmax

from et_jax.tasks import calibration
from et_jax.tasks.calibration import negative_log_likelihood

fit_temperature = jax.jit(calibration.fit_temperature)


def loss(z, targets, temperature):
    return -log_softmax(z, temperature)[np.arange(len(targets)), targets].mean()


def search(z, targets, low, high):
    """Return the least-loss temperature by golden section on its logarithm."""
    low, high, part = np.log(low), np.log(high), (5**0.5 - 1) / 2
    for _ in range(60):
        a, b = high - part * (high - low), low + part * (high - low)
        low, high = (low, b) if loss(z, targets, np.exp(a)) < loss(z, targets, np.exp(b)) else (a, high)
    return np.exp((low + high) / 2)


@pytest.fixture(scope="module")
def held_out():
    """Return logits of 2,000 positions and targets drawn from their softmax."""
    rng = np.random.default_rng(0)
    z = 2 * rng.normal(size=(2000, 30))
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    return z.astype(np.float32), np.array([rng.choice(30, p=row) for row in p])


@pytest.mark.parametrize("overconfidence", [0.4, 1.0, 2.5, 10.0])
def test_fitted_temperature_minimises_the_loss(held_out, overconfidence):
    z, targets = held_out
    z = z * np.float32(overconfidence)
    fitted = float(fit_temperature(jnp.asarray(z), jnp.asarray(targets)))
    assert fitted == pytest.approx(search(z, targets, 0.05, 20.0), rel=2e-3)
    assert fitted == pytest.approx(overconfidence, rel=0.1)
    found = negative_log_likelihood(jnp.asarray(z), jnp.asarray(targets), fitted)
    np.testing.assert_allclose(found, loss(z, targets, fitted), rtol=1e-5)


def test_a_fit_without_an_inner_minimum_ends_at_a_bound(held_out):
    z, _ = held_out
    best, worst = jnp.asarray(z.argmax(-1)), jnp.asarray(z.argmin(-1))
    assert float(fit_temperature(jnp.asarray(z), best)) == pytest.approx(0.05)
    assert float(fit_temperature(jnp.asarray(z), worst)) == pytest.approx(20.0)
