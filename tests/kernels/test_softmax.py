"""The settings of the softmax: what they refuse, and what of them is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from et_jax.softmax import Softmax


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale: got 0.0, wanted a positive number"),
        ({"soft_cap": -1.0}, "soft_cap: got -1.0, wanted a positive number or None"),
        ({"window": 0}, "window: got 0, wanted at least 1 token, or None"),
    ],
)
def test_a_wrong_setting_is_named(wrong, message):
    with pytest.raises(ValueError) as caught:
        Softmax(**{"scale": 1.0} | wrong)
    assert str(caught.value) == message


def test_there_is_a_sink_for_every_query_head_or_none():
    Softmax(scale=1.0).require_heads(4)
    sinks = Softmax(scale=1.0, sink_logits=jnp.zeros(4))
    sinks.require_heads(4)
    with pytest.raises(ValueError, match=r"sink_logits: got shape \(4,\), wanted \(h=6\)"):
        sinks.require_heads(6)
    with pytest.raises((ValueError, TypeCheckError)):
        Softmax(scale=1.0, sink_logits=jnp.zeros((4, 1)))


def test_only_the_sinks_are_traced():
    """Other sinks are the same program, another window is another one."""
    traced = []

    @jax.jit
    def scaled(softmax: Softmax):
        traced.append(softmax.window)
        assert softmax.sink_logits is not None
        return softmax.scale * softmax.sink_logits

    for window, sink in ((None, 1.0), (None, 2.0), (3, 1.0)):
        softmax = Softmax(scale=0.5, window=window, sink_logits=jnp.full(2, sink))
        np.testing.assert_array_equal(scaled(softmax), [sink / 2] * 2)
    assert traced == [None, 3]
    assert jax.tree.leaves(softmax.without_sinks) == [] and softmax.without_sinks == Softmax(scale=0.5, window=3)
