"""The Hopper kernel of decode attention, without a GPU: simulated on the CPU, lowered for CUDA, and what it refuses.

The simulation has copies, barriers and a detector of races. It has no wgmma: the products are plain ones here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_paged_attention import NAMED, assert_close, poisoned, run

from et_jax.pallas import hopper
from et_jax.pallas.paged_attention import gpu
from et_jax.pallas.paged_attention.shapes import TESTED, Shape, example

OTHERS = ("dim_128_bfloat16", "page_64", "int8_page_64")
SERVED = [shape for shape in TESTED if shape.name.startswith("hopper") or shape.name in OTHERS]
# what the others vary these vary too: see the slow test
BREADTH = [shape for shape in SERVED if shape.name not in ("hopper_group_3", "hopper_group_9", "page_64")]

RACES_RAISE = hasattr(plgpu.InterpretGPUParams(), "on_race")


@functools.cache
def simulated(config: gpu.Config | None = None, **settings):
    """The kernel on the CPU, raising on a race and on a read out of bounds; memory begins as NaN."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(lambda arrays: gpu.paged_attention(**arrays, **settings, config=config, interpret=interpret))


def simulate(arguments, shape: Shape):
    """Attention and block sums as float64 numpy."""
    return [np.asarray(x, np.float64) for x in simulated(**shape.settings)(arguments)]


def bits(arguments, shape: Shape):
    """Attention and block sums as bytes."""
    return [np.asarray(x).view(np.uint8) for x in simulated(**shape.settings)(arguments)]


def assert_equal_reference(shapes):
    for shape in shapes:
        arguments = example(shape)
        assert_close(simulate(arguments, shape), run(arguments, shape, "reference"), shape.dtype)


def test_simulated_equals_reference(capsys):
    assert_equal_reference(BREADTH)
    with capsys.disabled():
        print(f"\npaged_attention gpu, simulated = reference: {len(BREADTH)} shapes")
    assert len(BREADTH) == 15


@pytest.mark.slow
def test_simulated_equals_reference_in_the_other_shapes():
    assert_equal_reference([shape for shape in SERVED if shape not in BREADTH])


def test_lowers_for_cuda(capsys):
    for shape in SERVED:
        function = jax.jit(functools.partial(gpu.paged_attention, **shape.settings))
        module = export.export(function, platforms=["cuda"])(**example(shape)).mlir_module()
        assert "mosaic_gpu" in module
    with capsys.disabled():
        print(f"\npaged_attention gpu lowers for cuda: {len(SERVED)} shapes")
    assert len(SERVED) == 18


@pytest.mark.parametrize("name", ["hopper_window", "hopper_all_of_them", "hopper_int8_all_of_them"])
def test_what_is_not_seen_may_be_nan(name):
    shape = NAMED[name]
    arguments = example(shape)
    assert_close(simulate(poisoned(arguments, shape), shape), run(arguments, shape, "reference"), shape.dtype)


def test_padding_the_list_changes_no_bit():
    """The longer list has more parts, none of them used."""
    shape = NAMED["hopper_parts"]
    arguments = example(shape)
    out, block_lse = bits(arguments, shape)
    m = arguments["blocks"].shape[2]
    blocks = np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 41)), constant_values=7)
    wide_out, wide_lse = bits(arguments | {"blocks": blocks}, shape)
    np.testing.assert_array_equal(wide_out, out)
    np.testing.assert_array_equal(wide_lse[..., : 4 * m], block_lse)


def test_a_row_does_not_depend_on_its_neighbours():
    shape = NAMED["hopper_sparse"]
    arguments = example(shape)
    counts = np.array(arguments["counts"])
    counts[1] = 0
    pages = np.array(arguments["pages"])
    pages[:, arguments["page_table"][1]] = np.nan
    for change in ({"counts": counts}, {"pages": pages}):
        for got, expected in zip(bits(arguments | change, shape), bits(arguments, shape), strict=True):
            np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 3, 40])
@pytest.mark.parametrize("stages", [2, 5])
def test_any_config_gives_the_same(part, stages):
    shape = NAMED["hopper_sparse"]
    arguments = example(shape)
    kernel = simulated(config=gpu.Config(part=part, stages=stages), **shape.settings)
    got = [np.asarray(x, np.float64) for x in kernel(arguments)]
    assert_close(got, run(arguments, shape, "reference"), shape.dtype)


@pytest.fixture
def broken(monkeypatch):
    """Replace a primitive of the kernel; the simulation starts afresh after the failure."""
    simulated.cache_clear()
    yield functools.partial(monkeypatch.setattr, gpu.plgpu)
    simulated.cache_clear()
    reset_gpu_interpret_mode_state()


@pytest.mark.skipif(not RACES_RAISE, reason="JAX 0.11 prints a race and goes on")
def test_a_missing_wait_is_found(broken):
    """A consumer that does not wait for its page races with the copy."""
    broken("barrier_wait", lambda barrier: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        simulate(example(NAMED["hopper_group_1"]), NAMED["hopper_group_1"])


@pytest.mark.skipif(not RACES_RAISE, reason="JAX 0.11 prints a race and goes on")
def test_a_missing_fence_is_found(broken):
    """Without one, a copy may overtake the reads and writes of the page it replaces."""
    broken("commit_smem", lambda: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        simulate(example(NAMED["hopper_parts"]), NAMED["hopper_parts"])


def test_a_wrong_page_is_found(broken):
    shape = NAMED["hopper_group_1"]
    copy = plgpu.copy_gmem_to_smem

    def copy_the_null_page(source, target, barrier):
        is_tile = source.shape == (hopper.TILE, shape.width)
        copy(source.ref.at[0, 0] if is_tile else source, target, barrier)

    broken("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_close(simulate(arguments, shape), run(arguments, shape, "reference"), shape.dtype)


UNSERVED = {
    "multiplies bfloat16, not float32": {"dtype": "float32"},
    "multiplies bfloat16, not float32 queries with int8 pages": {"dtype": "float32", "int8": True},
    "reads pages of whole tiles of 64 tokens, not of 16": {"page_size": 16},
    "is laid out for head dims of 64, 128 and 256, not 96": {"head_dim": 96},
    "has columns for 16 query heads a KV head, not 17": {"num_heads": 17, "num_kv_heads": 1},
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_what_is_not_served_is_refused_with_the_reason(reason):
    shape = dataclasses.replace(NAMED["hopper_group_1"], **UNSERVED[reason])
    with pytest.raises(NotImplementedError) as caught:
        gpu.paged_attention(**example(shape), **shape.settings)
    assert str(caught.value).startswith(f'backend "gpu" {reason}') and str(caught.value).endswith(': use "xla"')


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8, 9, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_partial_results_take_under_a_hundredth_and_stages_fit(page_size, head_dim, group, dtype):
    config = gpu.heuristic(page_size, group, 2 * head_dim, dtype)
    tokens = config.part * page_size
    sums_a_column = head_dim + 2 + tokens // hopper.TILE  # of values, the maximum, the total, each tile's own sum
    in_bfloat16 = tokens * 2 * head_dim * jnp.dtype(jnp.bfloat16).itemsize
    assert 4 * sums_a_column * gpu.columns(group) < 0.01 * in_bfloat16
    assert config.stages >= gpu.DEEP
    converted = hopper.tile_bytes(2 * head_dim) if dtype == jnp.int8 else 0
    assert config.stages * hopper.tile_bytes(2 * head_dim, dtype) + converted + gpu.SMALL <= hopper.SHARED
