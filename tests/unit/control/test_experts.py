"""Rules for experts: how many of the likeliest a token goes to."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.experts import Entropy, ExpertRule, Mass, TopK

GATE = jnp.asarray([0.3, 0.2, 0.06, 0.04])  # shares of what the four have: 0.5, 0.333, 0.1, 0.067
called = jax.jit(lambda rule, gate, entropy: rule(gate, entropy))


def number(rule: ExpertRule, entropy: float = math.inf, gate=GATE) -> int:
    return int(called(rule, jnp.asarray(gate), jnp.float32(entropy)))


def test_mass_takes_as_few_as_contain_the_share_and_each_row_has_its_own():
    shares = jnp.asarray([0.0, 0.2, 0.49, 0.51, 0.83, 0.9, 0.99])
    found = jax.vmap(lambda share: Mass(share)(GATE, jnp.float32(0)))(shares)
    assert found.tolist() == [0, 1, 1, 2, 2, 3, 4]
    assert [number(TopK(most)) for most in (None, 1, 3)] == [4, 1, 3]
    for gate in ([1.0, 0.0, 0.0], [0.5, 1e-9, 1e-30], [0.2, 0.2, 0.2], [0.7]):  # a share of one takes all
        assert number(Mass(1.0), gate=gate) == len(gate) == number(Entropy(least=1.0), 0.0, gate=gate)


def share_at(rule: Entropy, entropy: float) -> float:
    """The formula, in float64."""
    part = np.asarray(GATE, np.float64) / np.sum(np.asarray(GATE, np.float64))
    spread = -np.sum(part * np.log(part)) / np.log(len(part))
    certain = (1 - min(entropy / float(rule.scale), 1)) * (1 - float(rule.gate) * spread)
    return float(rule.least) + (1 - float(rule.least)) * (1 - certain)


@pytest.mark.parametrize("rule", [Entropy(), Entropy(0.2, 3.0, 0.0), Entropy(0.1, 1.0, 1.0), Entropy(0.0, 4.0, 0.25)])
def test_entropy_takes_as_few_as_hold_a_share_that_doubt_raises(rule):
    before = np.cumsum([0, *np.asarray(GATE, np.float64)[:-1]]) / np.asarray(GATE, np.float64).sum()
    found = []
    for entropy in np.linspace(0, 5, 40):
        share = share_at(rule, entropy)
        found.append(number(rule, entropy))
        if np.abs(before - share).min() > 1e-5 and share < 1:
            assert found[-1] == np.sum(before < share)
    assert found[-1] == 4 > found[0]
    assert number(rule, math.inf) == 4


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TopK(0), "most: got 0"),
        (lambda: Mass(1.5), "share: got 1.5"),
        (lambda: Entropy(least=-0.1), "least: got -0.1"),
        (lambda: Entropy(gate=2.0), "gate: got 2.0"),
        (lambda: Entropy(scale=0.0), "scale: got 0.0"),
    ],
)
def test_a_number_out_of_range_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
