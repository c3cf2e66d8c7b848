"""Attention over the cache: rows that wait touch nothing, and a device gets the kernels that serve the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, configuration, same_bits

from et_jax.control.controller import Controller
from et_jax.control.select import Certified, coded_bounds
from et_jax.decode.backends import scoring_backend, serving_backend
from et_jax.decode.chunk import of_rows
from et_jax.decode.extend import attend
from et_jax.decode.readers import Selected
from et_jax.decode.rows import Rows
from et_jax.decode.state import empty
from et_jax.models.stacks import located, stacks_of

pytestmark = pytest.mark.usefixtures("hardly_optimised")


@pytest.mark.slow
def test_rows_that_do_not_run_read_and_write_nothing():
    config = configuration(controller=Controller(selector=Certified(coded_bounds)))
    state, nobody = empty(config), jnp.zeros(3, bool)
    rows = Rows(slot=None, token=state.token, position=state.length, run=nobody)
    chunk = of_rows(rows, state.table.pages, state.length + 1)
    reader = Selected(
        tolerance=state.control.tolerance,
        fresh=~nobody,
        block_mask=state.control.block_mask,
        kept_mass=state.signals.kept_mass,
        selectors=state.laws.selectors(MODEL.num_layers),
        page_size=config.page_size,
    )
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, 1, MODEL.num_heads, MODEL.head_dim)), jnp.float32)
    kv = q[:, :, : MODEL.num_kv_heads]
    before = state.plants[0].cache
    plant, of_layer = config.plants[0], reader.of_layer(config.plants[0], located(stacks_of(MODEL, stacked=False), 0))
    out, cached, notes = attend(plant, plant.model.softmax(0), chunk, of_layer, q, kv, kv, before.layers[0], None)
    stats = reader.noted(chunk, (notes,))
    assert not out.any() and not stats.blocks_read.any()
    np.testing.assert_array_equal(stats.kept_mass, 1.0)
    assert same_bits(cached, before.layers[0])


def serving(kind: str, platform: str, page_size: int, head_dim: int, dtype, cache_dtype=None):
    """What a device that is not here would be served by."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)):
        return serving_backend(dataclasses.replace(MODEL, head_dim=head_dim), page_size, dtype, cache_dtype or dtype)


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype", "reason"),
    [
        (16, 64, jnp.bfloat16, "pages of whole tiles"),
        (64, 96, jnp.bfloat16, "head dims"),
        (64, 64, jnp.float32, "float32"),
    ],
)
def test_what_the_hopper_kernel_refuses_is_served_by_xla_with_the_reason(page_size, head_dim, dtype, reason):
    backend, [refusal] = serving("NVIDIA H200", "cuda", page_size, head_dim, dtype)
    assert backend == "xla" and reason in refusal and 'use "xla"' in refusal


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_queries_and_pages_of_two_dtypes_are_served_by_kernels_that_take_both(dtypes):
    backend, [refusal] = serving("NVIDIA H200", "cuda", 64, 64, *dtypes)
    queries, pages = (jnp.dtype(one).name for one in dtypes)
    assert backend == "xla" and f"{queries} queries with {pages} pages" in refusal
    assert serving("TPU v5 lite", "tpu", 128, 128, *dtypes) == ("tpu", ())


@pytest.mark.parametrize("cached", [jnp.int8, jnp.float8_e4m3fn])
def test_a_cache_in_8_bits_is_served_by_each_device_s_own_kernels_or_the_reason_is_told(cached):
    assert serving("NVIDIA H200", "cuda", 64, 64, jnp.bfloat16, cached) == ("gpu", ())
    assert serving("TPU v6 lite", "tpu", 128, 128, jnp.bfloat16, cached) == ("tpu", ())
    backend, [refusal] = serving("TPU v5 lite", "tpu", 16, 128, jnp.bfloat16, cached)
    assert backend == "xla" and f"{jnp.dtype(cached)} pages of a multiple of 32 tokens, not 16" in refusal
    backend, [refusal] = serving("NVIDIA H200", "cuda", 64, 64, jnp.float32, cached)
    assert backend == "xla" and f"float32 queries with {jnp.dtype(cached)} pages" in refusal


def test_each_device_is_served_by_its_own_kernels_where_they_serve():
    assert serving("NVIDIA H200", "cuda", 64, 64, jnp.bfloat16) == ("gpu", ())
    assert serving("NVIDIA A100", "cuda", 64, 64, jnp.bfloat16) == ("xla", ())
    assert serving("TPU v5 lite", "tpu", 128, 128, jnp.bfloat16) == ("tpu", ())
    assert serving_backend(MODEL, 16, jnp.float32, jnp.float32) == ("xla", ())


def test_blocks_are_scored_by_the_backend_of_attention_or_by_one_that_can():
    """Hopper scores no head dim of 256: attention runs on it, and the reason says who scores instead."""
    model = dataclasses.replace(MODEL, head_dim=256)
    device = jax.sharding.AbstractDevice("NVIDIA H200", 1, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)):
        backend, [refusal] = scoring_backend(model, 64, jnp.bfloat16, True, "gpu")
        assert backend == "xla" and 'use "xla"' in refusal
    assert scoring_backend(MODEL, 16, jnp.float32, True, "reference") == ("reference", ())
