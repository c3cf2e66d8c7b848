"""The thermostat as a feedback loop: it contracts below its gain limit, cycles above, and bounds what drift adds.

Entropies come from float64 numpy; x is log T and e = x - x*, with H(x*) the target.
"""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import temperature
from et_jax.control.base import updated

LOW, HIGH = 0.4, 2.5
GRID = np.linspace(np.log(LOW), np.log(HIGH), 400)
quick = settings(max_examples=8, deadline=None)


def entropy_at(z, x):
    """Return the entropy and varentropy of softmax(z / e^x), for a number or a column of x."""
    u = np.asarray(z, np.float64) / np.exp(x)
    u = u - u.max(-1, keepdims=True)
    log_p = u - np.log(np.exp(u).sum(-1, keepdims=True))
    p = np.exp(log_p)
    h = -(p * log_p).sum(-1)
    return h, (p * log_p**2).sum(-1) - h**2


def set_point(z, target):
    low, high = np.log(LOW), np.log(HIGH)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_at(z, middle)[0] < target else (low, middle)
    return (low + high) / 2


def logits(seed, spread, size=60):
    return spread * np.random.default_rng(seed).normal(size=size)


@pytest.fixture(scope="module")
def loop(signals, state):
    """Return a function that runs a law against logits, one row a token, and gives log T before every token."""
    update = jax.jit(updated)

    def walk(law, rows, noise, start):
        now, xs = state(law, temperature=np.exp(start)), [start]
        for z, xi in zip(rows, noise, strict=True):
            h, v = entropy_at(z, xs[-1])
            now = update(law, signals(tempered_entropy=h + xi, tempered_varentropy=v, entropy=0.0), now)
            xs.append(float(np.log(np.float64(now.temperature))))
        return np.array(xs)

    return walk


SEEDS = st.integers(0, 10_000)


@quick
@given(seed=SEEDS, spread=st.floats(1.0, 4.0), share=st.floats(0.05, 1.9), start=st.floats(-0.8, 0.8))
def test_thermostat_contracts_while_gain_times_varentropy_is_below_two(loop, seed, spread, share, start):
    z = logits(seed, spread)
    slopes = entropy_at(z, GRID[:, None])[1]
    least, most = slopes.min() * 0.999, slopes.max() * 1.001
    gain, goal = share / most, 0.1
    rho = max(abs(1 - gain * least), abs(1 - gain * most))
    law = temperature.Thermostat(float(entropy_at(z, goal)[0]), gain, LOW, HIGH)
    off = np.abs(loop(law, [z] * 30, np.zeros(30), start) - goal)
    assert rho < 1
    assert np.all(off[1:] <= rho * off[:-1] + 2e-6)


@quick
@given(seed=SEEDS, spread=st.floats(1.5, 4.0))
def test_thermostat_never_settles_above_the_limit(loop, seed, spread):
    z = logits(seed, spread)
    h, v = entropy_at(z, 0.0)
    off = loop(temperature.Thermostat(float(h), float(2.2 / v), 0.1, 10.0), [z] * 80, np.zeros(80), 0.01)
    assert np.all(np.abs(off[-20:]) > 0.01)
    assert np.all(np.sign(off[-19:]) == -np.sign(off[-20:-1]))


@quick
@given(seed=SEEDS, spread=st.floats(1.5, 4.0))
def test_damped_thermostat_settles_at_any_gain(loop, seed, spread):
    z = logits(seed, spread)
    h, _ = entropy_at(z, 0.0)
    law = temperature.DampedThermostat(float(h), gain=1e3, least_varentropy=1e-3, low=LOW, high=HIGH)
    assert np.abs(loop(law, [z] * 60, np.zeros(60), 0.3)[-1]) < 1e-3


def test_damped_thermostat_is_the_thermostat_at_small_gain(signals, state):
    seen = signals(tempered_entropy=2.5, tempered_varentropy=3.0)
    plain = temperature.Thermostat(1.0, 0.1)(seen, state())
    damped = temperature.DampedThermostat(1.0, 0.1)(seen, state())
    np.testing.assert_allclose(plain.temperature, np.exp(-0.1 * 1.5), rtol=1e-6)
    np.testing.assert_allclose(damped.temperature, plain.temperature, rtol=1e-6)
    steep = temperature.DampedThermostat(1.0, 0.5)(seen, state())
    np.testing.assert_allclose(steep.temperature, np.exp(-1.5 / 3.0), rtol=1e-6)


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, share=st.floats(0.1, 1.8), noise=st.floats(0.0, 0.2), drift=st.floats(0.0, 0.1))
def test_error_stays_within_what_noise_and_drift_add(loop, seed, share, noise, drift):
    """|e'| <= rho |e| + gain noise + |x*' - x*| at every token, and its limit follows."""
    rng = np.random.default_rng(seed)
    steps, target = 60, 2.5
    rows = logits(seed, 2.0) + drift * np.cumsum(rng.normal(size=(steps, 60)), axis=0)
    # Each row is brought to the same entropy range, so that the set point stays inside the clip.
    rows = rows / rows.std(-1, keepdims=True) * 2.0
    aims = np.array([set_point(z, target) for z in rows])
    slopes = np.array([entropy_at(z, GRID[::8, None])[1] for z in rows])
    least, most = slopes.min() * 0.99, slopes.max() * 1.01
    gain = share / most
    rho = max(abs(1 - gain * least), abs(1 - gain * most))
    wrong = rng.uniform(-noise, noise, size=steps)
    xs = loop(temperature.Thermostat(target, gain, LOW, HIGH), rows, wrong, 0.5)
    off = np.abs(xs[:-1] - aims)
    moved = np.abs(np.diff(aims))
    assert np.all((aims > np.log(LOW)) & (aims < np.log(HIGH)))
    assert np.all(off[1:] <= rho * off[:-1] + gain * noise + moved + 5e-6)
    limit = (gain * noise + moved.max()) / (1 - rho)
    assert off[-1] <= rho ** (steps - 1) * off[0] + limit + 1e-4


def test_thermostat_cools_above_its_target_and_keeps_to_its_range(signals, state):
    law = temperature.Thermostat(2.0, 0.5, 0.5, 1.5)
    assert law(signals(tempered_entropy=3.0), state()).temperature < 1
    assert law(signals(tempered_entropy=1.0), state()).temperature > 1
    assert law(signals(tempered_entropy=12.0), state()).temperature == 0.5
    assert law(signals(tempered_entropy=0.0), state()).temperature == 1.5
    blind = law(signals(tempered_entropy=2.0, entropy=9.0), state())
    np.testing.assert_allclose(blind.temperature, 1.0, rtol=1e-6)


def test_fixed_changes_nothing(signals, state):
    before = state(temperature=0.7)
    after = temperature.Fixed()(signals(tempered_entropy=9.0), before)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), before, after))


@quick
@given(surprisals=hnp.arrays(np.float32, 24, elements=st.floats(0, 15, width=32)))
def test_mirostat_moves_the_cap_against_the_surprisal(signals, state, run, surprisals):
    start = state(MIROSTAT)
    assert start.surprisal_cap == 6.0
    states = run(MIROSTAT, start, signals(surprisal=surprisals))
    expected = 6.0 - 0.2 * np.cumsum(surprisals.astype(np.float64) - 3.0)
    np.testing.assert_allclose(states.surprisal_cap, expected, atol=1e-4)
    assert np.all(states.temperature == 1.0)


MIROSTAT = temperature.Mirostat2(3.0, 0.2)
