"""A head's sensitivity is the divergence that errors in its output cost, found by making them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH as WHOLE
from own_modules import Plain
from small_model import MODEL, NARROW, prompt, weights

from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import read_module
from et_jax.models.transformer import forward
from et_jax.tasks.calibration import head_sensitivity

LENGTH, START, ERROR = 12, 6, 0.02


def divergence(row: np.ndarray, errors: jax.Array) -> jax.Array:
    """Return the nats of KL over all tokens of a row, from no error to these, "l t h d"."""
    positions = jnp.arange(LENGTH)[None]

    def log_probs(errors):
        def attend(layer, q, k, v, memory, softmax):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True) + errors[layer][None], memory

        return jax.nn.log_softmax(forward(weights(), MODEL, row[None], positions, attend, None)[0][0])

    true, got = log_probs(jnp.zeros_like(errors)), log_probs(errors)
    return jnp.sum(jnp.exp(true[START:]) * (true - got)[START:])


def test_sensitivity_is_what_small_errors_cost():
    rows = np.array([prompt(seed, LENGTH) for seed in (0, 1)])
    found = head_sensitivity(MODEL, weights(), rows, START, draws=256)
    assert found.shape == (MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size)
    shape = MODEL.num_layers, LENGTH, MODEL.num_heads, MODEL.head_dim
    compiled, rng = jax.jit(divergence), np.random.default_rng(0)
    for layer in range(MODEL.num_layers):
        for head in range(MODEL.num_heads):
            cost = []
            for _ in range(24):
                errors = np.zeros(shape, np.float32)
                drawn = rng.normal(size=(LENGTH - START, MODEL.head_dim))
                errors[layer, START:, head] = ERROR * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
                cost += [float(compiled(jnp.asarray(row), errors)) for row in rows]
            nats = np.mean(cost) / ERROR**2 / (LENGTH - START)
            np.testing.assert_allclose(found.reshape(MODEL.num_layers, -1)[layer, head], nats, rtol=0.35)


def test_a_model_with_windows_is_refused():
    with pytest.raises(ValueError, match="no sliding window"):
        head_sensitivity(NARROW, weights(), np.array([prompt(0, LENGTH)]), START)


def test_a_head_of_a_module_that_nothing_reads_costs_nothing():
    module = Plain(61, rngs=nnx.Rngs(0))
    out = module.attention[1].out.kernel
    out[...] = out[...].at[2].set(0.0)
    model, params = read_module(module, ModuleConfig(max_positions=WHOLE))
    rows = np.random.default_rng(0).integers(0, 61, (1, LENGTH))
    found = head_sensitivity(model, params, rows, START)
    assert found.shape == (2, 4, 1) and found[1, 2, 0] == 0
    assert (np.delete(found.reshape(-1), 6) > 0).all()
