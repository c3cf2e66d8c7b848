"""Laws of the forward pass, whatever the weights: who sees whom, what positions mean, what attention is handed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend, dense_logits
from small_model import MODEL, NARROW, VOCABULARY, weights

from et_jax.models.transformer import abstract, describe, forward, initialise, num_weights, weight_bytes
from et_jax.models.weights import quantized

LENGTH = 12
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH)).astype(np.int32)
TOLERANCE = 2e-4  # float32 sums of 48 products over logits of size ten


def logits(tokens, model=MODEL, shift: int = 0):
    positions = jnp.broadcast_to(shift + jnp.arange(tokens.shape[1]), tokens.shape)
    run = jax.jit(lambda tokens, positions: forward(weights(), model, tokens, positions, dense_attend(model), None)[0])
    return np.asarray(run(jnp.asarray(tokens), positions))


def test_a_token_changes_its_own_position_and_what_comes_after_and_no_other_row():
    changed = TOKENS.copy()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    before, after = (np.asarray(dense_logits(MODEL, weights(), jnp.asarray(t))) for t in (TOKENS, changed))
    np.testing.assert_array_equal(after[0, :5], before[0, :5])
    assert (np.abs(after[0, 5:] - before[0, 5:]).max(axis=-1) > 1e-3).all()
    np.testing.assert_array_equal(after[1], before[1])


def test_a_token_out_of_the_reach_of_every_window_is_forgotten():
    """Two layers whose windows hold six tokens: what stands more than ten back cannot be known."""
    narrow = dataclasses.replace(NARROW, windows=(6, 6))
    changed = TOKENS.copy()
    changed[0, 0] = (changed[0, 0] + 1) % VOCABULARY
    before, after = (np.asarray(dense_logits(narrow, weights(), jnp.asarray(t))) for t in (TOKENS, changed))
    np.testing.assert_array_equal(after[0, 11:], before[0, 11:])
    assert (np.abs(after[0, :11] - before[0, :11]).max(axis=-1) > 0).all()


def test_only_the_distance_between_positions_matters():
    """Rotations turn queries and keys alike, so a shift of all positions cancels."""
    np.testing.assert_allclose(logits(TOKENS, shift=17), logits(TOKENS), atol=TOLERANCE, rtol=TOLERANCE)
    positions = jnp.broadcast_to(2 * jnp.arange(LENGTH), TOKENS.shape)
    spread, _ = forward(weights(), MODEL, jnp.asarray(TOKENS), positions, dense_attend(MODEL), None)
    assert np.abs(np.asarray(spread) - logits(TOKENS)).max() > 0.1


def test_attention_is_asked_once_a_layer_in_order_and_its_memory_handed_on():
    shapes = []

    def attend(layer, q, k, v, memory, softmax):
        shapes.append((q.shape, k.shape, v.shape))
        return q, (*memory, layer)

    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    _, memory = forward(weights(), MODEL, jnp.asarray(TOKENS), positions, attend, ())
    kv = (2, LENGTH, MODEL.num_kv_heads, MODEL.head_dim)
    assert memory == (0, 1) and shapes == [((2, LENGTH, MODEL.num_heads, MODEL.head_dim), kv, kv)] * 2


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}, {"tie_embeddings": True}])
def test_weights_are_drawn_as_they_are_described(changes):
    config = dataclasses.replace(MODEL, **changes)
    drawn, specs = initialise(config, jax.random.key(1)), describe(config)
    assert jax.tree.structure(drawn) == jax.tree.structure(specs)
    for weight, spec in zip(jax.tree.leaves(drawn), jax.tree.leaves(specs), strict=True):
        assert weight.shape == spec.shape and len(spec.axes) == len(spec.shape)
        deviation = float(jnp.std(weight))
        if not spec.deviation:
            np.testing.assert_array_equal(weight, 1 if spec.deviation is None else 0)
        else:  # five standard errors of a deviation
            assert abs(deviation / spec.deviation - 1) < 5 / math.sqrt(2 * weight.size)
    assert num_weights(config) == sum(weight.size for weight in jax.tree.leaves(drawn))


@pytest.mark.parametrize("changes", [{"qkv_bias": True, "qk_norm": True}, {"tie_embeddings": True}])
def test_weights_in_8_bits_are_told_before_they_exist(changes):
    config = dataclasses.replace(MODEL, **changes)
    found, told = quantized(initialise(config, jax.random.key(1)), jnp.bfloat16), abstract(config, jnp.bfloat16, "int8")
    assert jax.tree.structure(found) == jax.tree.structure(told)
    for leaf, shape in zip(jax.tree.leaves(found), jax.tree.leaves(told), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    assert weight_bytes(config, jnp.bfloat16, "int8") == sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    matrices = [spec for spec in jax.tree.leaves(describe(config)) if len(spec.shape) == 2]
    vectors = num_weights(config) - sum(math.prod(spec.shape) for spec in matrices)
    by_hand = sum(spec.shape[0] * (spec.shape[1] + 4) for spec in matrices) + 2 * vectors
    assert weight_bytes(config, jnp.bfloat16, "int8") == by_hand


def test_a_model_in_8_bits_is_near_the_one_that_it_was_made_of():
    """Of a hundred roundings to 127ths a logit keeps two digits; weights of one rounding wrong would keep none."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)

    def attend(layer, q, k, v, memory):
        return q, memory

    exact, rounded = (
        np.asarray(forward(params, MODEL, jnp.asarray(TOKENS), positions, attend, ())[0], np.float64)
        for params in (weights(), quantized(weights(), jnp.float32))
    )
    assert 0 < (rounded - exact).std() < 0.05 * exact.std()
