"""Rules for experts: how many of the likeliest a token goes to."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.experts import RULES, SHARES, Entropy, ExpertRule, Mass, TopK
from et_jax.control.presets import preset
from et_jax.control.settings import adjusted

GATE = jnp.asarray([0.3, 0.2, 0.06, 0.04])  # shares of what the four have: 0.5, 0.333, 0.1, 0.067


def number(rule: ExpertRule, entropy: float = math.inf, gate=GATE) -> int:
    return int(rule(gate, jnp.float32(entropy)))


def test_as_many_as_trained_or_so_many():
    assert [number(TopK(most)) for most in (None, 1, 3)] == [4, 1, 3]


@pytest.mark.parametrize(("share", "held"), [(0.0, 0), (0.2, 1), (0.49, 1), (0.51, 2), (0.83, 2), (0.9, 3), (0.99, 4)])
def test_mass_takes_as_few_as_hold_the_share(share, held):
    assert number(Mass(share)) == held


@pytest.mark.parametrize("gate", [[1.0, 0.0, 0.0], [0.5, 1e-9, 1e-30], [0.2, 0.2, 0.2]])
def test_a_share_of_one_takes_all_however_little_they_weigh(gate):
    assert number(Mass(1.0), gate=jnp.asarray(gate)) == 3 == number(Entropy(least=1.0), gate=jnp.asarray(gate))


def share_at(rule: Entropy, entropy: float, gate) -> float:
    """The formula, in float64."""
    part = np.asarray(gate, np.float64) / np.sum(np.asarray(gate, np.float64))
    spread = -np.sum(part * np.log(part)) / np.log(len(part))
    certain = (1 - min(entropy / float(rule.scale), 1)) * (1 - float(rule.gate) * spread)
    return float(rule.least) + (1 - float(rule.least)) * (1 - certain)


@pytest.mark.parametrize("rule", [Entropy(), Entropy(0.2, 3.0, 0.0), Entropy(0.1, 1.0, 1.0), Entropy(0.0, 4.0, 0.25)])
def test_entropy_takes_as_few_as_hold_a_share_that_doubt_raises(rule):
    found = []
    for entropy in np.linspace(0, 5, 40):
        share = share_at(rule, entropy, GATE)
        before = np.cumsum(np.asarray(GATE, np.float64) / float(GATE.sum())) - np.asarray(GATE) / float(GATE.sum())
        if np.abs(before - share).min() > 1e-5 and share < 1:
            assert number(rule, entropy) == np.sum(before < share)
        found.append(number(rule, entropy))
    assert found == sorted(found) and found[-1] == 4 > found[0]
    assert number(rule, math.inf) == 4


def test_one_expert_alone_is_taken():
    assert [number(rule, 0.0, jnp.asarray([0.7])) for rule in (TopK(), Mass(0.5), Entropy())] == [1, 1, 1]


def test_rows_have_their_own_numbers_in_one_program():
    rules = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), Mass(0.2), Mass(0.6), Mass(1.0))
    found = jax.vmap(lambda rule: rule(GATE, jnp.float32(0)))(rules)
    assert found.tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopK(0), "most: got 0"),
        (lambda: Mass(1.5), "share: got 1.5"),
        (lambda: Entropy(least=-0.1), "least: got -0.1"),
        (lambda: Entropy(gate=2.0), "gate: got 2.0"),
        (lambda: Entropy(scale=0.0), "scale: got 0.0"),
    ],
)
def test_a_number_that_cannot_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_rules_are_found_by_name_and_their_shares():
    assert {name: rule() for name, rule in RULES.items()} == {"top_k": TopK(), "mass": Mass(), "entropy": Entropy()}
    assert {name: getattr(RULES[name](), field) for name, field in SHARES.items()} == {"mass": 0.9, "entropy": 0.5}
    assert Entropy.by_entropy and not Mass.by_entropy


def test_a_request_may_set_a_number_of_the_rule_beside_a_knob_of_the_preset():
    laws = preset("certified").with_experts(Mass(0.9))
    changed = adjusted(laws, {"share": 0.5, "tolerance": 0.2})
    assert changed.experts == Mass(0.5)
    assert changed.with_experts(None) == preset("certified", tolerance=0.2)
    assert adjusted(laws, {"tolerance": 0.2}).experts == Mass(0.9)
