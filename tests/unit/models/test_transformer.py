"""What the forward pass is made of: weights as they are described, and numbers that no golden file shows.

That the pass is what transformers makes of the same weights stands in `test_golden.py`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend
from small_model import MODEL, VOCABULARY

from et_jax.models import transformer
from et_jax.models.config import Rope, RopeScaling
from et_jax.models.layers import feed_forward, rms_norm, rope_frequencies, rotate
from et_jax.models.params import abstract, describe, num_weights, weight_bytes
from et_jax.models.transformer import forward, initialise
from et_jax.models.weights import quantized

LENGTH = 12
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH)).astype(np.int32)


KINDS = [
    {"qkv_bias": True, "qk_norm": True},
    {"tie_embeddings": True},
    {"norms": "around", "norm_offset": 1.0},
    {"norms": "after", "qk_norm": True, "qk_norm_over": "width"},
]


@pytest.mark.parametrize("changes", KINDS)
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


@pytest.mark.parametrize("changes", KINDS[:2])
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
