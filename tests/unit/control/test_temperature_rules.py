"""Rules: the temperature they give has the entropy they promise, by float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import temperature_rules as rules

TARGET, LOW, HIGH = 2.0, 0.2, 3.0
quick = settings(max_examples=40, deadline=None)


def entropy_of(z, temperature):
    u = np.asarray(z, np.float64) / temperature
    p = np.exp(u - u.max())
    p /= p.sum()
    p = p[p > 0]
    return -(p * np.log(p)).sum()


@pytest.fixture(scope="module")
def decide(signals, state):
    """Return a function that gives a rule's temperature for logits and the temperature the laws have set."""
    compiled = {}

    def call(rule, z, base):
        def whole(z, base):
            def moments_at(temperature):
                log_p = jax.nn.log_softmax(z / temperature)
                p = jnp.exp(log_p)
                h = -jnp.sum(p * log_p)
                return h, jnp.sum(p * log_p * log_p) - h * h

            return rule(moments_at, signals(entropy=jnp.nan), state(temperature=base))

        if rule not in compiled:
            compiled[rule] = jax.jit(whole)
        return float(compiled[rule](jnp.asarray(z, jnp.float32), jnp.float32(base)))

    return call


LOGITS = st.tuples(st.integers(0, 10_000), st.floats(0.2, 12.0)).map(
    lambda drawn: drawn[1] * np.random.default_rng(drawn[0]).standard_t(3, size=40)
)
BASE = st.floats(0.05, 4.0)
SOLVE = rules.Solve(TARGET, low=LOW, high=HIGH)
NEWTON, MANY = rules.Newton(TARGET, low=LOW, high=HIGH), rules.Newton(TARGET, num_steps=60, low=LOW, high=HIGH)
COOL, EDT = rules.CoolOnly(SOLVE), rules.EDT(1.5)


@quick
@given(z=LOGITS, base=BASE)
def test_solve_finds_the_target_or_the_bound_nearest_to_it(decide, z, base):
    got = decide(SOLVE, z, base)
    if entropy_of(z, HIGH) <= TARGET:
        assert got == pytest.approx(HIGH, rel=1e-4)
    elif entropy_of(z, LOW) >= TARGET:
        assert got == pytest.approx(LOW, rel=1e-4)
    else:
        assert LOW <= got <= HIGH
        assert entropy_of(z, got) == pytest.approx(TARGET, abs=2e-3)


@quick
@given(z=LOGITS, base=BASE)
def test_newton_steps_towards_the_target_without_passing_far(decide, z, base):
    start = min(max(base, LOW), HIGH)
    h = entropy_of(z, start)
    once = decide(NEWTON, z, base)
    assert LOW * (1 - 1e-6) <= once <= HIGH * (1 + 1e-6)
    if abs(h - TARGET) > 1e-3:
        towards = np.sign(TARGET - h)
        bound = LOW if towards < 0 else HIGH
        assert np.sign(once - start) == towards or start == pytest.approx(bound)
    many = decide(MANY, z, base)
    if entropy_of(z, LOW) < TARGET < entropy_of(z, HIGH):
        assert abs(entropy_of(z, many) - TARGET) <= abs(h - TARGET) + 1e-3


def test_newton_by_hand(decide):
    z = np.log([0.5, 0.25, 0.125, 0.125])
    h, v = 1.75 * np.log(2), 0.6875 * np.log(2) ** 2  # at T = 1, by hand
    rule = rules.Newton(1.0, least_varentropy=0.1)
    assert decide(rule, z, 1.0) == pytest.approx(np.exp(-min(1.0, 1 / v) * (h - 1.0)), rel=1e-5)
    steep = rules.Newton(1.0, gain=50.0, least_varentropy=0.1)
    assert decide(steep, z, 1.0) == pytest.approx(np.exp(-(h - 1.0) / v), rel=1e-5)


@quick
@given(z=LOGITS, base=BASE)
def test_cool_only_never_warms(decide, z, base):
    assert decide(COOL, z, base) == pytest.approx(min(base, decide(SOLVE, z, base)), rel=1e-6)


@quick
@given(z=LOGITS, base=BASE)
def test_edt_warms_with_the_raw_entropy(decide, z, base):
    h = entropy_of(z, 1.0)
    assert decide(EDT, z, base) == pytest.approx(base * 0.8 ** (1.5 / h) if h > 0 else 0.0, rel=1e-3, abs=1e-6)


def test_edt_is_greedy_where_the_model_is_certain(decide):
    assert decide(EDT, np.array([500.0, 0.0, 0.0]), 1.0) == 0.0
