"""Rules: the temperature they give has the entropy they promise, by float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import temperature_rules as rules

TARGET, LOW, HIGH = 2.0, 0.2, 3.0


def moments_of(z, temperature):
    u = np.asarray(z, np.float64) / temperature
    p = np.exp(u - u.max())
    p /= p.sum()
    p = p[p > 0]
    entropy = -(p * np.log(p)).sum()
    return entropy, (p * np.log(p) ** 2).sum() - entropy**2


@pytest.fixture(scope="module")
def decide(signals, state):
    """Return a function that gives the temperatures of all rules for logits and the temperature the laws have set."""

    @jax.jit
    def all_rules(z, base):
        def moments_at(temperature):
            log_p = jax.nn.log_softmax(z / temperature)
            p = jnp.exp(log_p)
            h = -jnp.sum(p * log_p)
            return h, jnp.sum(p * log_p * log_p) - h * h

        return {name: rule(moments_at, signals(entropy=jnp.nan), state(temperature=base)) for name, rule in RULES}

    def call(z, base):
        return {name: float(x) for name, x in all_rules(jnp.asarray(z, jnp.float32), jnp.float32(base)).items()}

    return call


SOLVE = rules.Solve(TARGET, low=LOW, high=HIGH)
NEWTON = rules.Newton(TARGET, num_steps=2, gain=0.7, least_varentropy=0.5, low=LOW, high=HIGH)
RULES = [("solve", SOLVE), ("newton", NEWTON), ("cool only", rules.CoolOnly(SOLVE)), ("edt", rules.EDT(1.5))]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(0, 10_000), st.floats(0.2, 12.0)).map(
        lambda drawn: drawn[1] * np.random.default_rng(drawn[0]).standard_t(3, size=40)
    ),
    st.floats(0.05, 4.0),
)
@example(np.array([500.0, 0.0, 0.0]), 1.0)  # certain
def test_rules_give_the_temperatures_of_their_definitions(decide, z, base):
    got = decide(z, base)
    if moments_of(z, HIGH)[0] <= TARGET:
        assert got["solve"] == pytest.approx(HIGH, rel=1e-4)
    elif moments_of(z, LOW)[0] >= TARGET:
        assert got["solve"] == pytest.approx(LOW, rel=1e-4)
    else:
        assert LOW <= got["solve"] <= HIGH
        assert moments_of(z, got["solve"])[0] == pytest.approx(TARGET, abs=2e-3)
    assert got["cool only"] == pytest.approx(min(base, got["solve"]), rel=1e-6)
    entropy = moments_of(z, 1.0)[0]
    assert got["edt"] == pytest.approx(base * 0.8 ** (1.5 / entropy) if entropy > 0 else 0.0, rel=1e-3, abs=1e-6)
    x = np.log(np.clip(base, LOW, HIGH))
    for _ in range(2):
        entropy, varentropy = moments_of(z, np.exp(x))
        x = np.clip(x - min(0.7, 1 / max(varentropy, 0.5)) * (entropy - TARGET), np.log(LOW), np.log(HIGH))
    assert got["newton"] == pytest.approx(np.exp(x), rel=1e-3)
