"""Shares of drafts accepted, against enumeration and races run by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.evidence import coupling


def two_models(rows: int, size: int, apart: float = 1.0, seed: int = 0):
    """Logits of a model and of its drafter."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (rows, size)).astype(np.float32)
    return logits, (logits + rng.normal(0, apart, (rows, size))).astype(np.float32)


def distributions(rows: int, size: int, **how):
    return [coupling.probabilities(jnp.asarray(logits), 0.7) for logits in two_models(rows, size, **how)]


def test_probabilities_are_of_the_heated_logits():
    found = coupling.probabilities(jnp.log(jnp.array([[1.0, 2.0, 4.0]])), 0.5)
    assert found == pytest.approx(np.array([[1, 4, 16]]) / 21, rel=1e-6)


def test_the_share_of_a_race_is_the_sum_over_tokens_of_winning_both():
    p, q = distributions(5, 7)
    direct = [
        sum(1 / sum(max(a[j] / a[i], b[j] / b[i]) for j in range(7)) for i in range(7))
        for a, b in zip(p, q, strict=True)
    ]
    assert coupling.race(p, q) == pytest.approx(direct, rel=1e-12)
    assert coupling.race(p, p) == pytest.approx(np.ones(5), rel=1e-12)


def test_races_of_exponential_clocks_agree_as_often():
    draws = 200_000
    clocks = np.random.default_rng(1).exponential(size=(draws, 6))
    for p, q in zip(*distributions(4, 6, apart=2.0), strict=True):
        share = ((clocks / p).argmin(1) == (clocks / q).argmin(1)).mean()
        exact = coupling.race(p[None], q[None])[0]
        assert abs(share - exact) < 4 * (exact * (1 - exact) / draws) ** 0.5


def test_one_number_through_both_distribution_functions():
    """Between two neighbours of all ends of intervals each model gives one token."""
    p, q = distributions(5, 9)
    for a, b, found in zip(p, q, coupling.inverse_cdf(p, q), strict=True):
        ends = np.unique(np.concatenate([[0.0], np.cumsum(a)[:-1], np.cumsum(b)[:-1], [1.0]]))
        middle = (ends[1:] + ends[:-1]) / 2
        tokens = [(middle[:, None] > np.cumsum(x)[:-1]).sum(1) for x in (a, b)]
        assert found == pytest.approx(np.diff(ends)[tokens[0] == tokens[1]].sum(), rel=1e-12)


def test_the_best_coupling_and_the_bound():
    """Of thirds against a half, a half and nothing: 2/3 of the mass is shared, TV is 1/3."""
    p, q = np.array([[1, 1, 1]]) / 3, np.array([[0.5, 0.5, 0.0]])
    assert coupling.optimum(p, q) == pytest.approx(2 / 3)
    assert coupling.bound(p, q) == pytest.approx(1 / 2)
    p, q = distributions(50, 30)
    assert (coupling.bound(p, q) < coupling.race(p, q)).all() and (coupling.race(p, q) < coupling.optimum(p, q)).all()


def test_what_the_engine_samples_agrees_as_often_as_the_formula_says():
    """At few positions with many keys: a key that came twice would show."""
    model, drafter = (jnp.asarray(logits).reshape(2, 8, 50) for logits in two_models(16, 50))
    for temperature in (0.4, 1.0):
        found = coupling.acceptance(model, drafter, temperature, 8, 300, seed=1)
        assert abs(found["sigmas"]) < 4
        off = found["shares"]["sampled"][0] - found["shares"]["race"][0]
        exact = coupling.race(*(coupling.probabilities(x.reshape(16, 50), temperature) for x in (model, drafter)))
        assert found["shares"]["race"][0] == pytest.approx(exact.mean())
        assert found["sigmas"] == pytest.approx(off / ((exact * (1 - exact)).sum() / 300) ** 0.5 * 16)


def test_greedy_drafts_hold_where_the_likeliest_tokens_are_one():
    model = jnp.array([[[1.0, 2.0], [3.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    drafter = jnp.array([[[1.0, 2.0], [1.0, 3.0]], [[0.0, 2.0], [0.0, 3.0]]])
    found = coupling.acceptance(model, drafter, 0.0, 2, 1, seed=0)["shares"]
    assert {share[0] for share in found.values()} == {0.75}
