"""The Hopper kernel of prefill attention, without a GPU: simulated on the CPU, and lowered for CUDA."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import finds_the_race, lower, races_raise
from absent_gpu import simulate as simulated
from jax.experimental.pallas import mosaic_gpu as plgpu
from ladder import as_bytes, assert_attention_close, with_nan_unseen
from test_paged_prefill import (
    NAMED,
    assert_equals_reference,
    assert_fault_shows,
    both,
    listing_every_block,
    with_a_fault,
    with_nan_beyond_the_lists,
    written,
)

from et_jax.pallas import hopper
from et_jax.pallas.paged_prefill import gpu
from scripts.measuring.kernel_shapes.paged_prefill import TESTED, Shape, example

KERNEL = gpu.paged_prefill
SERVED = [shape for shape in TESTED if shape.name.startswith("hopper")]
# A shape for each path, raced: one tile a page and two, each head dim, rows far apart, several blocks of queries, a
# window, block sums, lists with all that changes the scores, a pool in 8 bits.
PATHS = [
    NAMED[name]
    for name in (
        "hopper_group_3",
        "hopper_dim_256",
        "hopper_ragged",
        "hopper_long_chunk",
        "hopper_window",
        "hopper_block_sums",
        "hopper_sparse_all_of_them",
        "hopper_int8",
    )
]


def simulate(arguments, shape: Shape):
    """Attention and block sums."""
    return simulated(KERNEL, arguments, **shape.settings)


def is_right(shape: Shape):
    arguments = example(shape)
    assert_equals_reference(simulate(arguments, shape), arguments, shape)


def test_simulated_equals_reference(rung):
    rung("paged_prefill gpu, simulated = reference", PATHS[:2], 2, is_right)


@pytest.mark.slow
def test_simulated_equals_reference_in_any_shape(rung):
    rung("paged_prefill gpu, simulated = reference", SERVED, 15, is_right)


@pytest.mark.slow
def test_lowers_for_cuda(rung):
    def check(shape: Shape):
        lower(KERNEL, example(shape), **shape.settings)

    rung("paged_prefill gpu lowers for cuda", SERVED, 15, check)


@pytest.mark.parametrize("name", ["hopper_group_3", "hopper_window", "hopper_fp8"])
def test_tokens_past_a_query_may_be_nan(name):
    """With half the chunk real, the other half's keys and values and the null page NaN, real rows are right."""
    shape = NAMED[name]
    arguments = example(shape)
    real = shape.chunk // 2
    dirty = with_nan_unseen(arguments, written(arguments, shape, real), shape.width)
    (dirty, _), (expected, _) = simulate(dirty, shape), both(arguments, shape, "reference")
    assert_attention_close((dirty[:, :real], None), (expected[:, :real], None), shape.dtype)


@pytest.mark.parametrize("name", ["hopper_sparse", "hopper_sparse_all_of_them", "hopper_int8"])
def test_pages_that_are_not_listed_may_be_nan(name):
    shape = NAMED[name]
    arguments = example(shape)
    assert_equals_reference(simulate(with_nan_beyond_the_lists(arguments, shape), shape), arguments, shape)


@pytest.mark.parametrize("name", ["hopper_window"])
def test_dense_is_listing_every_block(name):
    """Bit for bit, with block sums and without them."""
    shape = NAMED[name]
    arguments = example(shape)
    listed = listing_every_block(arguments, shape)
    asked, unasked = (dataclasses.replace(shape, block_lse=block_lse) for block_lse in (True, False))
    out, lse = simulate(arguments, asked)
    listed_out, listed_lse = simulate(listed, asked)
    for other in (listed_out, simulate(arguments, unasked)[0], simulate(listed, unasked)[0]):
        np.testing.assert_array_equal(as_bytes(other), as_bytes(out))
    np.testing.assert_array_equal(listed_lse, lse)


@pytest.mark.parametrize("column", [3, 130])
@pytest.mark.parametrize("token", [5, 33])
def test_a_fault_that_is_seen_shows(column, token):
    """A NaN in a key or a value, before the chunk or in it, reaches every query that sees it, and no other."""
    shape = NAMED["hopper_group_1"]
    arguments = example(shape)
    pages = np.array(arguments["pages"])
    pages[0, np.asarray(arguments["page_table"])[0, 0], token, column] = np.nan
    out = np.asarray(simulate(arguments | {"pages": pages}, shape)[0], np.float64)[0]
    first = max(0, token - shape.starts[0])
    assert np.isnan(out[first:, 0]).any(axis=-1).all()
    assert not np.isnan(out[:first]).any() and not np.isnan(out[:, 1:]).any()


@pytest.mark.parametrize("of_value", [False, True])
def test_a_fault_in_8_bits_that_is_seen_shows(of_value):
    shape = NAMED["hopper_fp8"]
    assert_fault_shows(simulate(with_a_fault(example(shape), shape, of_value), shape)[0], shape)


@races_raise
@pytest.mark.parametrize("primitive", ["barrier_wait", "commit_smem"])
def test_a_missing_wait_or_fence_is_found(broken_gpu, primitive):
    shape = NAMED["hopper_long_chunk"]
    broken_gpu(primitive, lambda *barrier: None)
    finds_the_race(KERNEL, example(shape), **shape.settings)


def test_a_wrong_page_is_found(broken_gpu):
    shape = NAMED["hopper_group_1"]
    copy = plgpu.copy_gmem_to_smem

    def copy_the_null_page(source, target, barrier):
        is_tile = source.shape == (hopper.TILE, shape.width)
        copy(source.ref.at[0, 0] if is_tile else source, target, barrier)

    broken_gpu("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_equals_reference(simulate(arguments, shape), arguments, shape)


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_stages_fit(head_dim, dtype):
    width, stages = 2 * head_dim, gpu.heuristic(2 * head_dim, dtype).stages
    queries = gpu.CONSUMERS * gpu.ROWS * head_dim * 2
    converted = hopper.tile_bytes(width) if dtype == jnp.int8 else 0
    assert stages >= 2
    assert queries + stages * hopper.tile_bytes(width, dtype) + converted + gpu.SMALL <= hopper.SHARED
