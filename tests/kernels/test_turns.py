"""Kernels that find the pages of a layer in a pool of several layers: the same as in a pool of that layer alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BLOCK, CODE
from ladder import taken
from test_per_head import DIM, HEADS, PAGE, given

from et_jax.decode.attention.summaries import summarised_by_kernel
from et_jax.decode.cache import kv
from et_jax.pallas.block_scores import gpu as scores_gpu
from et_jax.pallas.per_head.api import by_vmap
from et_jax.pallas.per_head.gpu import by_kernels
from et_jax.types import replace

STACKED = {"turn": jnp.asarray([1], jnp.int32), "depth": 3}


def stacked(pool):
    """A pool of three layers, the second the given one, and NaN or an extreme in the others."""
    other = jnp.full_like(pool, jnp.nan if jnp.issubdtype(pool.dtype, jnp.inexact) else 100)
    return jnp.concatenate([other, pool, other], axis=1)


@pytest.mark.parametrize("backend", ["gpu", "xla"])
@pytest.mark.parametrize("operation", [BLOCK, CODE], ids=lambda each: each.name)
def test_blocks_of_a_layer_are_scored_by_its_pages(operation, backend):
    shape = operation.shapes["hopper_dim_128"]
    arguments = {name: jnp.asarray(x) for name, x in taken(operation.function, operation.example(shape)).items()}
    pools = {name: stacked(x) for name, x in arguments.items() if name in ("key_box", "mean", "key_codes")}

    def run(**given):
        if backend == "xla":
            return operation.function(**given, **shape.settings, backend="xla")
        return getattr(scores_gpu, operation.name)(**given, **shape.settings, interpret=True)

    for one, other in zip(run(**arguments | pools, **STACKED), run(**arguments), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("run", [by_vmap, lambda function, inputs: by_kernels(function, inputs, interpret=True)])
def test_a_function_receives_the_numbers_of_its_layer(run):
    *inputs, share = given(4)
    layered = replace(share, array=jnp.concatenate([0 * share.array, share.array]), layer=jnp.asarray([1], jnp.int32))

    def product(score, length, value, listed, share):
        return score * share[:, None]

    np.testing.assert_array_equal(run(product, (*inputs, layered)), run(product, (*inputs, share)))


def test_a_page_is_summarised_in_its_layer():
    layer = kv.empty(1, HEADS, DIM, 12, PAGE, jnp.float32, key_codes=True).layers[0]
    drawn = np.random.default_rng(0).normal(size=layer.pages.shape)
    layer, page = replace(layer, pages=jnp.asarray(drawn, jnp.float32)), jnp.asarray([[3], [7]], jnp.int32)
    many = jax.tree.map(stacked, layer)
    one, all_ = (
        summarised_by_kernel(each.summaries, each.key_codes, each.pages, None, page, DIM, **more, interpret=True)
        for each, more in ((layer, {}), (many, STACKED))
    )
    size = layer.pages.shape[1]
    before = jax.tree.leaves((many.summary, many.key_codes))
    for alone, layered, old in zip(jax.tree.leaves(one), jax.tree.leaves(all_), before, strict=True):
        np.testing.assert_array_equal(layered[:, size : 2 * size], alone)
        np.testing.assert_array_equal(layered[:, 2 * size :], old[:, 2 * size :])
        np.testing.assert_array_equal(layered[:, :size], old[:, :size])
