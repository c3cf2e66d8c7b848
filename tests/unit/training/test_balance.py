"""The load balance of experts: its formula, and what pulls on what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.experts import Choice
from et_jax.training.balance import load_balance


def chosen(expert) -> Choice:
    return Choice(expert=jnp.asarray(expert, jnp.int32), weight=jnp.ones(np.shape(expert)))


def test_the_load_balance_is_that_of_the_formula():
    """E sum_i f_i P_i, with f_i counted token by token (Fedus et al. 2021, equations 4 to 6, for several choices)."""
    drawn = np.random.default_rng(0).dirichlet([2.0, 1.0, 0.5, 0.3, 0.2], 40)
    best = np.argsort(-drawn, axis=1)[:, :2]
    falls = [np.mean([i in row for row in best]) / 2 for i in range(5)]
    expected = 5 * sum(falls[i] * drawn[:, i].mean() for i in range(5))
    assert float(load_balance(jnp.asarray(drawn, jnp.float32), chosen(best))) == pytest.approx(expected, rel=1e-6)
    assert expected > 1.05


def test_experts_that_are_chosen_more_become_less_probable():
    pull = jax.grad(lambda p: load_balance(p, chosen([[0], [0], [1]])))(jnp.full((3, 3), 1 / 3))
    np.testing.assert_allclose(pull, np.tile(3 * np.array([2 / 3, 1 / 3, 0]) / 3, (3, 1)), rtol=1e-6)
