"""Who speaks, along entropies of every kind, against the loop of the paper written out; how hysteresis departs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.switch import MODEL, SMALL, AsPrinted, Hysteresis

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
