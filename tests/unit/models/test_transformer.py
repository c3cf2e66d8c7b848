"""Laws of the forward pass, whatever the weights: who sees whom, what positions mean, what attention is handed."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend, dense_logits
from small_model import MODEL, NARROW, VOCABULARY, weights

from et_jax.models import transformer
from et_jax.models.config import Rope, RopeScaling
from et_jax.models.layers import feed_forward, rms_norm, rope_angles, rope_frequencies, rotate
from et_jax.models.params import abstract, describe, num_weights, weight_bytes
from et_jax.models.transformer import forward, initialise
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "qk_norm": True},
        {"tie_embeddings": True},
        {"norms": "around", "norm_offset": 1.0},
        {"norms": "after", "qk_norm": True, "qk_norm_over": "width"},
    ],
)
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

    def attend(layer, q, k, v, memory, softmax):
        return q, memory

    exact, rounded = (
        np.asarray(forward(params, MODEL, jnp.asarray(TOKENS), positions, attend, ())[0], np.float64)
        for params in (weights(), quantized(weights(), jnp.float32))
    )
    assert 0 < (rounded - exact).std() < 0.05 * exact.std()


def test_layers_that_turn_and_see_differently_share_one_trace(monkeypatch):
    kinds = {"windows": (4, 4, None, 4), "window_rope_theta": 100.0, "unrotated": (1,)}
    config = dataclasses.replace(MODEL, num_layers=4, norms="around", max_positions=LENGTH, **kinds)
    calls = []
    monkeypatch.setattr(transformer, "rotate", lambda x, *angles: calls.append(x.shape) or rotate(x, *angles))
    monkeypatch.setattr(transformer, "feed_forward", lambda *given: calls.append("ffn") or feed_forward(*given))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    run = functools.partial(forward, config=config, attend=dense_attend(config), memory=None)
    jax.eval_shape(run, abstract(config, jnp.float32), tokens=TOKENS, positions=positions)
    assert len(calls) == 3  # queries, keys and a feed-forward


def test_a_layer_without_positions_leaves_every_bit():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, LENGTH, 3, 8)), jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    np.testing.assert_array_equal(rotate(x, *rope_angles(None, 8, positions)), x)
    part = Rope(theta=100.0, dim=4, max_positions=LENGTH)
    turned = rotate(x, *rope_angles(part, 4, positions))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    whole = rotate(x[..., :4], *rope_angles(part, 4, positions))
    np.testing.assert_array_equal(turned[..., :4], whole)
    assert (np.asarray(whole[:, 1:], np.float32) != np.asarray(x[:, 1:, :, :4], np.float32)).any()


def test_long_rotary_positions_are_their_formula():
    """Each frequency over its factor, the short ones in a model that reads no more than the original length."""
    short, long = (1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 8.0, 16.0)
    scaling = RopeScaling(
        kind="longrope", factor=4.0, original_max_positions=64, short_factors=short, long_factors=long
    )
    plain = 100.0 ** (-np.arange(0, 8, 2) / 8)
    for reads, factors in ((64, short), (65, long)):
        found, factor = rope_frequencies(Rope(theta=100.0, dim=8, max_positions=reads, scaling=scaling))
        np.testing.assert_allclose(found, plain / factors, rtol=1e-6)
        assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_a_norm_adds_its_offset_in_float32():
    """In bfloat16 1 + 2^-10 is 1: folded into the weight, it would be lost."""
    weight = jnp.full(4, 2.0**-10, jnp.bfloat16)
    found = rms_norm(jnp.ones((1, 4), jnp.float32), weight, 0.0, 1.0)
    np.testing.assert_array_equal(found, np.float32(1 + 2.0**-10))
    assert (1 + weight == 1).all()
