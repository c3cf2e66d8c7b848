"""Rules for experts are compared at exactly as many experts as they took."""

import jax.numpy as jnp
import numpy as np
import pytest
from scripts_here import script

from et_jax.control.experts import Mass
from et_jax.evidence.expert_arms import Taken

measure = script("measure_experts")


def taken(counts: np.ndarray) -> Taken:
    """A stand-in of a mixture of four choices: what a token loses is one over its experts."""
    expert = np.where(np.arange(4) < counts[..., None], np.arange(4), 16)
    loss = jnp.asarray(1 / counts.mean(-1), jnp.float32)
    return Taken(loss=loss, entropy=jnp.zeros_like(loss), expert=jnp.asarray(expert))


def test_a_rule_is_compared_with_a_constant_and_its_own_numbers_shuffled():
    asked = []

    def by(rule):
        assert isinstance(rule, Mass)
        high = int(1000 * float(rule.share)) + np.arange(64 * 8 * 2).reshape(64, 8, 2) % 1000 >= 1000
        return taken(np.where(high, 3, 1))

    def told(counts):
        asked.append(counts)
        return taken(counts)

    def of(found):
        return np.sum(np.asarray(found.expert) < 16, -1)

    line, own = measure.compared(by, told, of, "mass", 2.0, 0.01)
    assert line["experts"] == pytest.approx(2.0, rel=0.01)
    constant, moved = asked
    assert set(constant.ravel().tolist()) <= {1, 2, 3} and constant.mean() == pytest.approx(line["experts"])
    counts = of(own)
    assert sorted(map(tuple, moved.reshape(-1, 2))) == sorted(map(tuple, counts.reshape(-1, 2)))
    over = np.mean(np.asarray(own.loss) - 1 / constant.mean(-1))
    assert line["over_constant"]["mean"] == pytest.approx(over, abs=1e-6)
    assert line["over_constant"]["low"] <= over <= line["over_constant"]["high"]


def test_what_fewer_experts_lose_is_told_by_quarters_of_doubt():
    entropy = jnp.asarray(np.random.default_rng(0).permutation(400).reshape(4, 100), jnp.float32)
    expert = jnp.zeros((4, 100, 1, 1), jnp.int32)
    more = Taken(loss=jnp.zeros((4, 100)), entropy=entropy, expert=expert)
    fewer = Taken(loss=entropy / 400, entropy=entropy, expert=expert)
    lost = [one["lost"] for one in measure.by_doubt(fewer, more)]
    np.testing.assert_allclose(lost, [0.125, 0.375, 0.625, 0.875], atol=0.01)
