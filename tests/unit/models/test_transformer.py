"""What the forward pass is made of: weights as they are described, and numbers that no golden file shows.

That the pass is what transformers makes of the same weights stands in `test_golden.py`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL

from et_jax.models.config import Rope, RopeScaling
from et_jax.models.layers import rms_norm, rope_frequencies
from et_jax.models.params import describe, num_multiplied, num_weights, weight_bytes
from et_jax.models.transformer import initialise


@pytest.mark.parametrize(
    "changes",
    [
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
    total = sum(weight.size for weight in jax.tree.leaves(drawn))
    assert num_weights(config) == total and weight_bytes(config, jnp.bfloat16) == 2 * total
    assert num_multiplied(config) == total - (0 if config.tie_embeddings else drawn.embedding.array.size)
    matrices = [weight for weight in jax.tree.leaves(drawn) if weight.ndim == 2]
    saved = sum(weight.size - 4 * len(weight) for weight in matrices)  # a byte a number, and a float32 for each row
    assert weight_bytes(config, jnp.bfloat16, "int8") == 2 * total - saved


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
