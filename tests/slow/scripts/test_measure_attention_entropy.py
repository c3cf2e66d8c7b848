"""Arms of the script: tokens that are read again, and factors that follow a signal."""

import jax.numpy as jnp
import numpy as np
from scripts_here import script

from et_jax.evidence.forced import Score


def score(value: float, margin) -> Score:
    each = jnp.full((1, 20), value)
    counts = jnp.full((1, 20), int(value), jnp.int32)
    return Score(
        divergence=each,
        loss=each,
        agrees=each > 1.5,
        margin=jnp.asarray(margin, jnp.float32)[None],
        read=counts,
        held=jnp.full((1, 20), 9, jnp.int32),
        entropy=jnp.zeros((1, 1, 20, 1, 1)),
    )


def test_the_tokens_of_least_margin_are_read_again_and_both_readings_are_counted():
    margin = np.arange(20.0)[::-1]
    found = script("measure_attention_entropy").redone(score(1.0, margin), score(2.0, margin))
    last_two = np.arange(20) >= 18
    np.testing.assert_array_equal(found.divergence[0], np.where(last_two, 2.0, 1.0))
    np.testing.assert_array_equal(found.agrees[0], last_two)
    np.testing.assert_array_equal(found.read[0], np.where(last_two, 3, 1))


def test_factors_of_tokens_follow_a_signal_by_as_much_as_asked():
    signal = np.random.default_rng(0).gamma(2.0, size=(3, 50))
    factors = script("measure_attention_entropy").of_tokens(signal, -0.2)
    assert factors.shape == (3, 1, 50, 1, 1)
    logs = np.log(factors[:, 0, :, 0, 0])
    np.testing.assert_allclose([logs.mean(), logs.std()], [0.0, 0.2], atol=1e-9)
    np.testing.assert_allclose(np.corrcoef(logs.ravel(), signal.ravel())[0, 1], -1.0)
