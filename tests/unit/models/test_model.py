"""What the decoder asks of a model, by formula, whichever kind it is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from own_modules import LENGTH, Plain

from et_jax.models import model, transformer, weights
from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import read_module
from scripts.measuring.shapes import SMALL

HALF = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_the_transformer_is_counted_from_its_weights(tied):
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    params = transformer.initialise(config, jax.random.key(0), HALF)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert model.num_weights(config) == total
    assert model.num_multiplied(config) == total - (0 if tied else params.embedding.array.size)
    assert model.weight_bytes(config, HALF) == 2 * total and model.weight_bytes(config, jnp.float32) == 4 * total
    assert model.token_numbers(config) == 3 * config.intermediate_size + 6 * config.hidden_size
    assert model.dtype_of(params) == HALF and model.device_of(params) == jax.devices()[0]


def test_a_module_has_the_bytes_that_it_has():
    found, own = a_module()
    assert model.weight_bytes(found, jnp.float32) == sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    assert model.num_weights(found) == found.num_weights and model.num_multiplied(found) == found.num_multiplied
    assert model.token_numbers(found) == 9 * found.widest
    assert model.dtype_of(own) == HALF and model.device_of(own) == jax.devices()[0]


def a_module():
    with jax.numpy_dtype_promotion("standard"):  # flax mixes dtypes of its own
        return read_module(Plain(61, dtype=HALF, rngs=nnx.Rngs(0)), ModuleConfig(max_positions=LENGTH))


def order(x: Any) -> tuple[int, ...]:
    """Return the axes of an array as they lie, the outermost first."""
    return x.format.layout.major_to_minor


def test_weights_are_put_where_they_are_wanted_and_embeddings_as_they_are_looked_up_in(monkeypatch):
    columns = Layout(major_to_minor=(1, 0))
    monkeypatch.setattr(weights, "by_rows", lambda x: Format(columns, x.sharding))
    given = transformer.initialise(SMALL, jax.random.key(0), HALF), a_module()[1]
    found: Any = model.put(given, jax.devices()[0])
    assert order(found[0].embedding.array) == (1, 0)
    assert order(found[0].layers[0].q.array) == (0, 1)
    assert all(leaf.committed for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found[0], given[0])
    assert jax.tree.structure(found[1]) == jax.tree.structure(given[1])
