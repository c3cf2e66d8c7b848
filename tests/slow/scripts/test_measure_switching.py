"""The turns that know nothing of entropy: shares as asked for, runs of ten tokens, the first words."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import SCRIPTS

from et_jax.control.switch import MODEL

SCRIPT = SCRIPTS / "measure_switching.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("measure_switching", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def speakers(switch, number: int, seed: int) -> np.ndarray:
    entropies = jnp.asarray(np.random.default_rng(seed).exponential(2.0, number), jnp.float32)

    def token(state, entropy):
        asked = switch.before(state, entropy)
        handed = jax.tree.map(lambda new, old: jnp.where(asked.speaker != state.speaker, new, old), asked, state)
        return switch.after(handed, entropy), handed.speaker

    return np.asarray(jax.lax.scan(token, switch.started(), entropies)[1])


def test_a_coin_gives_the_model_its_share_in_runs(script):
    each = np.stack([speakers(script.ByCoin(0.3), 200, seed) for seed in range(60)])
    runs = each.reshape(60, 20, 10)
    assert (runs == runs[:, :, :1]).all()
    for coins in (runs[:, :, 0], runs[:, 0, 0]):  # of all runs, and of the first alone
        assert abs((coins == MODEL).mean() - 0.3) < 4 * (0.3 * 0.7 / coins.size) ** 0.5
    assert not any((speakers(script.ByCoin(0.0), 50, seed) == MODEL).any() for seed in range(3))


def test_by_position_the_model_has_the_first_words(script):
    assert (speakers(script.ByPosition(7), 20, 0) == MODEL).tolist() == [True] * 7 + [False] * 13
