"""The Hopper kernel of decode attention, without a GPU: simulated on the CPU, lowered for CUDA, and what it refuses."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import finds_the_race, lower, races_raise, simulate
from jax.experimental.pallas import mosaic_gpu as plgpu
from ladder import as_bytes
from test_paged_attention import NAMED, assert_equals_reference, poisoned

from et_jax.pallas import hopper
from et_jax.pallas.paged_attention import gpu
from scripts.measuring.kernel_shapes.paged_attention import TESTED, Shape, example

KERNEL = gpu.paged_attention
OTHERS = ("dim_128_bfloat16", "page_64", "int8_page_64", "fp8_page_64")
SERVED = [shape for shape in TESTED if shape.name.startswith("hopper") or shape.name in OTHERS]
# A shape for each path, raced and poisoned: one tile a page and two, eight columns and sixteen, each head dim, several
# parts, empty slots, what changes the scores, a pool in 8 bits; several rows a slot.
PATHS = [
    NAMED[name]
    for name in (
        "dim_128_bfloat16",
        "hopper_group_16",
        "hopper_dim_256",
        "hopper_empty_slots",
        "hopper_window",
        "hopper_all_of_them",
        "hopper_int8_all_of_them",
        "hopper_rows",
        "hopper_rows_split",
        "hopper_rows_all_of_them",
    )
]


def is_right(shape: Shape):
    """With NaN in all that no query sees, and no race."""
    arguments = example(shape)
    assert_equals_reference(simulate(KERNEL, poisoned(arguments, shape), **shape.settings), arguments, shape)


def test_simulated_equals_reference(rung):
    rung("paged_attention gpu, simulated = reference", PATHS[:2], 2, is_right)


@pytest.mark.slow
def test_simulated_equals_reference_in_any_shape(rung):
    rung("paged_attention gpu, simulated = reference", SERVED, 23, is_right)


@pytest.mark.slow
def test_lowers_for_cuda(rung):
    rung(
        "paged_attention gpu lowers for cuda", SERVED, 23, lambda shape: lower(KERNEL, example(shape), **shape.settings)
    )


def test_padding_the_list_changes_no_bit():
    """The longer list has more parts, none of them used."""
    arguments = example(NAMED["hopper_parts"])
    out, block_lse = as_bytes(simulate(KERNEL, arguments))
    m = arguments["blocks"].shape[2]
    blocks = np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 41)), constant_values=7)
    wide_out, wide_lse = as_bytes(simulate(KERNEL, arguments | {"blocks": blocks}))
    np.testing.assert_array_equal(wide_out, out)
    np.testing.assert_array_equal(wide_lse[..., : 4 * m], block_lse)


def test_a_row_does_not_depend_on_its_neighbours():
    arguments = example(NAMED["hopper_sparse"])
    counts, pages = np.array(arguments["counts"]), np.array(arguments["pages"])
    counts[1] = 0
    pages[:, arguments["page_table"][1]] = np.nan
    expected = as_bytes(simulate(KERNEL, arguments))
    for change in ({"counts": counts}, {"pages": pages}):
        for got, wanted in zip(as_bytes(simulate(KERNEL, arguments | change)), expected, strict=True):
            np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 3, 40])
@pytest.mark.parametrize("stages", [2, 5])
def test_any_config_gives_the_same(part, stages):
    shape = NAMED["hopper_sparse"]
    arguments = example(shape)
    assert_equals_reference(simulate(KERNEL, arguments, config=gpu.Config(part=part, stages=stages)), arguments, shape)


@races_raise
@pytest.mark.parametrize(("primitive", "name"), [("barrier_wait", "hopper_group_1"), ("commit_smem", "hopper_parts")])
def test_a_missing_wait_or_fence_is_found(broken_gpu, primitive, name):
    """A consumer that does not wait races with the copy; without a fence a copy overtakes the reads before it."""
    broken_gpu(primitive, lambda *barrier: None)
    finds_the_race(KERNEL, example(NAMED[name]))


def test_a_wrong_page_is_found(broken_gpu):
    shape = NAMED["hopper_group_1"]
    copy = plgpu.copy_gmem_to_smem

    def copy_the_null_page(source, target, barrier):
        is_tile = source.shape == (hopper.TILE, shape.width)
        copy(source.ref.at[0, 0] if is_tile else source, target, barrier)

    broken_gpu("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_equals_reference(simulate(KERNEL, arguments), arguments, shape)


UNSERVED = {
    "multiplies bfloat16, not float32": {"dtype": "float32"},
    "multiplies bfloat16, not float32 queries with int8 pages": {"dtype": "float32", "in_8_bits": "int8"},
    "reads pages of whole tiles of 64 tokens, not of 16": {"page_size": 16},
    "is laid out for head dims of 64, 128 and 256, not 96": {"head_dim": 96},
    "has columns for 16 query heads a KV head, not 17": {"num_heads": 17, "num_kv_heads": 1},
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_what_is_not_served_is_refused_with_the_reason(reason):
    shape = dataclasses.replace(NAMED["hopper_group_1"], **UNSERVED[reason])
    with pytest.raises(NotImplementedError) as caught:
        KERNEL(**example(shape))
    assert str(caught.value).startswith(f'backend "gpu" {reason}') and str(caught.value).endswith(': use "xla"')


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8, 9, 16, 20, 32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_partial_results_take_little_and_stages_fit(page_size, head_dim, group, dtype):
    config = gpu.heuristic(page_size, group, 2 * head_dim, dtype)
    tokens = config.part * page_size
    sums_a_column = head_dim + 2 + tokens // hopper.TILE  # of values, the maximum, the total, each tile's own sum
    in_bfloat16 = tokens * 2 * head_dim * jnp.dtype(jnp.bfloat16).itemsize
    assert 4 * sums_a_column < 0.013 / gpu.COLUMNS * in_bfloat16
    assert config.part == gpu.heuristic(page_size, 1, 2 * head_dim, dtype).part
    assert config.stages >= gpu.DEEP
    converted = hopper.tile_bytes(2 * head_dim) if dtype != jnp.bfloat16 else 0
    assert config.stages * hopper.tile_bytes(2 * head_dim, dtype) + converted + gpu.SMALL <= hopper.SHARED
