"""Real keys as blocks: the captured pass is the model's, and its blocks add up to attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from head_of_keys import LENGTH, PAGE_SIZE, blocks, head, weights

from et_jax.evidence.block_views import capture
from et_jax.models.transformer import initialise
from scripts.measuring.shapes import SMALL


def test_the_captured_pass_gives_the_models_logits():
    params = initialise(SMALL, jax.random.key(0))
    tokens = jnp.arange(LENGTH, dtype=jnp.int32) % SMALL.vocab_size
    logits, layers = capture(SMALL, params, tokens)
    np.testing.assert_allclose(logits, dense_logits(SMALL, params, tokens[None])[0], rtol=1e-5, atol=1e-5)
    assert [tuple(x.shape for x in layer) for layer in layers] == [((32, 4, 8), (32, 2, 8), (32, 2, 8))] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"windows": (None, 16)}, "got sliding windows in attention"),
        ({"score_cap": 3.0}, "got soft caps in attention"),
        ({"windows": (16, None), "sinks": True}, "got sliding windows and sinks in attention"),
    ],
)
def test_a_model_with_windows_caps_or_sinks_is_refused(changes, said):
    config = dataclasses.replace(SMALL, **changes)
    params = initialise(config, jax.random.key(0))
    with pytest.raises(ValueError, match=said):
        capture(config, params, jnp.zeros(8, jnp.int32))


def test_blocks_add_up_to_attention():
    query, key, value = head(group=2)
    seen, weight = blocks(query, key, value), weights(query, key)
    np.testing.assert_allclose(seen.output.sum(1), weight / weight.sum(1, keepdims=True) @ value, rtol=1e-4, atol=1e-5)
    with np.errstate(divide="ignore"):
        log_mass = np.log(weight.reshape(2, -1, PAGE_SIZE).sum(-1))
    np.testing.assert_allclose(seen.log_mass, log_mass, rtol=1e-5)
    assert seen.view.num_tokens.tolist() == [4] * 7 + [2]
    np.testing.assert_array_equal(seen.view.key_max[7], key[28:30].max(0))
