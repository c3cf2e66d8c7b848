"""Rules beside the laws, by their formulas in NumPy: temperatures, numbers of experts, and the switch of two models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import surprisal_moments
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import temperature_rules as rules
from et_jax.control.experts import Entropy, ExpertRule, Mass, TopK
from et_jax.control.switch import MODEL, SMALL, AsPrinted, Hysteresis

TARGET, LOW, HIGH = 2.0, 0.2, 3.0


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
RULES = [
    ("solve", SOLVE),
    ("newton", NEWTON),
    ("cool only", rules.CoolOnly(SOLVE)),
    ("edt", rules.EDT(1.5)),
    ("dynamic", rules.Dynamic(0.7, 1.5)),
]


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
    if surprisal_moments(z, HIGH)[0] <= TARGET:
        assert got["solve"] == pytest.approx(HIGH, rel=1e-4)
    elif surprisal_moments(z, LOW)[0] >= TARGET:
        assert got["solve"] == pytest.approx(LOW, rel=1e-4)
    else:
        assert LOW <= got["solve"] <= HIGH
        assert surprisal_moments(z, got["solve"])[0] == pytest.approx(TARGET, abs=2e-3)
    assert got["cool only"] == pytest.approx(min(base, got["solve"]), rel=1e-6)
    entropy = surprisal_moments(z, 1.0)[0]
    low, share = max(0.0, base - 0.7), entropy / np.log(len(z))
    assert got["dynamic"] == pytest.approx(low + (base + 0.7 - low) * share**1.5, rel=1e-3, abs=1e-5)
    assert got["edt"] == pytest.approx(base * 0.8 ** (1.5 / entropy) if entropy > 0 else 0.0, rel=1e-3, abs=1e-6)
    x = np.log(np.clip(base, LOW, HIGH))
    for _ in range(2):
        entropy, varentropy = surprisal_moments(z, np.exp(x))
        x = np.clip(x - min(0.7, 1 / max(varentropy, 0.5)) * (entropy - TARGET), np.log(LOW), np.log(HIGH))
    assert got["newton"] == pytest.approx(np.exp(x), rel=1e-3)


# Experts.

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


# Two models.

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]


@jax.jit
def speakers(switch, entropies):
    """Who produces each token "s t"; a model that takes over before a token predicts it anew with the same entropy."""

    def step(state, entropy):
        before = switch.before(state, entropy)
        turned = before.speaker != state.speaker
        state = jax.tree.map(lambda new, old: jnp.where(turned, new, old), before, state)
        return switch.after(state, entropy), state.speaker

    return jax.vmap(lambda row: jax.lax.scan(step, switch.started(), row)[1])(entropies)


def printed(row):
    """The loop of the paper."""
    count, speaker = 0, SMALL
    for t in range(len(row)):
        yield speaker
        count += 1
        if count >= 10 and (speaker == SMALL) == (np.mean(row[: t + 1][-5:]) > 1.25):
            speaker, count = 1 - speaker, 0


def with_hysteresis(row):
    """Every mean is of one speaker."""
    own, count, speaker = [], 2, SMALL
    for entropy in row:
        if speaker == SMALL and count >= 2 and np.mean([*own, entropy][-4:]) > 1.25:
            speaker, own, count = MODEL, [], 0
        yield speaker
        own, count = [*own, entropy], count + 1
        if speaker == MODEL and count >= 2 and np.mean(own[-4:]) <= 0.625:
            speaker, own, count = SMALL, [], 0


@pytest.mark.parametrize(
    ("switch", "loop"), [(AsPrinted(1.25), printed), (Hysteresis(1.25, low=0.5, window=4, least=2), with_hysteresis)]
)
def test_a_switch_is_its_loop(switch, loop):
    """Along entropies that change at every token, and such that stay for some."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.choice(LEVELS, (80, 60)), np.repeat(rng.choice(LEVELS, (80, 15)), 4, axis=1)])
    expected = np.array([list(loop(row)) for row in rows])
    np.testing.assert_array_equal(speakers(switch, jnp.asarray(rows, jnp.float32)), expected)
    assert len(np.unique(expected.sum(1))) > 5
