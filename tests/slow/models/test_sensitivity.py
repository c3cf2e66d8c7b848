"""A head's sensitivity is the divergence that errors in its output cost, found by making them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend, dense_logits
from flax import nnx
from own_modules import LENGTH as WHOLE
from own_modules import Plain
from places import GOLDEN
from small_model import MODEL, prompt, weights

from et_jax.models.checkpoint import load
from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import read_module
from et_jax.models.sensitivity import causal_attend, head_sensitivity
from et_jax.models.transformer import forward

LENGTH, START, ERROR = 12, 6, 0.02
CAPPED = dataclasses.replace(MODEL, windows=(3, None), score_cap=2.0)


def divergence(model, params, row: np.ndarray, errors: jax.Array) -> jax.Array:
    """Return the nats of KL over all tokens of a row, from no error to these, "l t h d"."""
    positions, plain = jnp.arange(LENGTH)[None], dense_attend(model)

    def log_probs(errors):
        def attend(layer, q, k, v, memory, softmax):
            out, memory = plain(layer, q, k, v, memory, softmax)
            return out + errors[layer][None], memory

        return jax.nn.log_softmax(forward(params, model, row[None], positions, attend, None)[0][0])

    true, got = log_probs(jnp.zeros_like(errors)), log_probs(errors)
    return jnp.sum(jnp.exp(true[START:]) * (true - got)[START:])


@pytest.mark.parametrize("model", [MODEL, CAPPED], ids=["plain", "windows and caps"])
def test_sensitivity_is_what_small_errors_cost(model):
    rows, params = np.array([prompt(seed, LENGTH) for seed in (0, 1)]), weights(model=model)
    found = head_sensitivity(model, params, rows, START, draws=256)
    assert found.shape == (model.num_layers, model.num_kv_heads, model.group_size)
    shape = model.num_layers, LENGTH, model.num_heads, model.head_dim
    compiled, rng = jax.jit(partial(divergence, model, params)), np.random.default_rng(0)
    for layer in range(model.num_layers):
        for head in range(model.num_heads):
            cost = []
            for _ in range(24):
                errors = np.zeros(shape, np.float32)
                drawn = rng.normal(size=(LENGTH - START, model.head_dim))
                errors[layer, START:, head] = ERROR * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
                cost += [float(compiled(jnp.asarray(row), errors)) for row in rows]
            nats = np.mean(cost) / ERROR**2 / (LENGTH - START)
            np.testing.assert_allclose(found.reshape(model.num_layers, -1)[layer, head], nats, rtol=0.35)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_is_the_plain_definition_with_windows_caps_and_sinks(family):
    config, params = load(GOLDEN / family, "float32")
    tokens = jnp.asarray(np.load(GOLDEN / family / "golden.npz")["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    found = forward(params, config, tokens, positions, causal_attend, None)[0]
    np.testing.assert_allclose(found, dense_logits(config, params, tokens), rtol=0, atol=1e-4)


def test_a_head_of_a_module_that_nothing_reads_costs_nothing():
    module = Plain(61, rngs=nnx.Rngs(0))
    out = module.attention[1].out.kernel
    out[...] = out[...].at[2].set(0.0)
    model, params = read_module(module, ModuleConfig(max_positions=WHOLE))
    rows = np.random.default_rng(0).integers(0, 61, (1, LENGTH))
    found = head_sensitivity(model, params, rows, START)
    assert found.shape == (2, 4, 1) and found[1, 2, 0] == 0
    assert (np.delete(found.reshape(-1), 6) > 0).all()
