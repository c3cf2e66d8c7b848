"""The Hopper kernel of prefill attention, without a GPU: simulated on the CPU, and lowered for CUDA.

The simulation has copies, barriers and a detector of races. It has no wgmma: the products are plain ones here.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_paged_prefill import NAMED, assert_close, compiled, listing_every_block, pair, with_nan_beyond_the_lists

from et_jax.pallas import hopper
from et_jax.pallas.paged_prefill import gpu
from et_jax.pallas.paged_prefill.shapes import TESTED, Shape, example

SERVED = [shape for shape in TESTED if shape.name.startswith("hopper")]

RACES_RAISE = hasattr(plgpu.InterpretGPUParams(), "on_race")


@functools.cache
def simulated(**settings):
    """The kernel on the CPU, raising on a race and on a read out of bounds; memory begins as NaN."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(lambda arrays: gpu.paged_prefill(**arrays, **settings, interpret=interpret))


def simulate(arguments, shape: Shape):
    """Attention and block sums."""
    return simulated(**shape.settings)(arguments)


def reference(arguments, shape: Shape):
    """Attention and block sums by the definition."""
    return pair(compiled("reference", **shape.settings)(arguments), shape)


def test_simulated_equals_reference(capsys):
    for shape in SERVED:
        arguments = example(shape)
        assert_close(simulate(arguments, shape), reference(arguments, shape), shape)
    with capsys.disabled():
        print(f"\npaged_prefill gpu, simulated = reference: {len(SERVED)} shapes")
    assert len(SERVED) == 13


def test_lowers_for_cuda(capsys):
    for shape in SERVED:
        function = jax.jit(functools.partial(gpu.paged_prefill, **shape.settings))
        module = export.export(function, platforms=["cuda"])(**example(shape)).mlir_module()
        assert "mosaic_gpu" in module
    with capsys.disabled():
        print(f"\npaged_prefill gpu lowers for cuda: {len(SERVED)} shapes")
    assert len(SERVED) == 13


@pytest.mark.parametrize("name", ["hopper_group_3", "hopper_window"])
def test_tokens_past_a_query_may_be_nan(name):
    """With half the chunk real, the other half's keys and values and the null page NaN, real rows are right."""
    shape = NAMED[name]
    arguments = example(shape)
    real = shape.chunk // 2
    pages = np.array(arguments["pages"])
    unused = np.ones(pages.shape[1:3], bool)
    for row, start in enumerate(shape.starts):
        place = np.arange(start + real)
        unused[np.asarray(arguments["page_table"])[row, place // shape.page_size], place % shape.page_size] = False
    pages[:, unused] = np.nan
    (dirty, _), (expected, _) = simulate(arguments | {"pages": pages}, shape), reference(arguments, shape)
    assert_close((dirty[:, :real], None), (expected[:, :real], None), shape)


@pytest.mark.parametrize("name", ["hopper_sparse", "hopper_sparse_all_of_them"])
def test_pages_that_are_not_listed_may_be_nan(name):
    shape = NAMED[name]
    arguments = example(shape)
    assert_close(simulate(with_nan_beyond_the_lists(arguments, shape), shape), reference(arguments, shape), shape)


@pytest.mark.parametrize("name", ["hopper_block_sums", "hopper_window"])
def test_dense_is_listing_every_block(name):
    """Bit for bit, with block sums and without them."""
    shape = NAMED[name]
    arguments = example(shape)
    listed = listing_every_block(arguments, shape)
    asked, unasked = (dataclasses.replace(shape, block_lse=block_lse) for block_lse in (True, False))
    out, lse = (np.asarray(x) for x in simulate(arguments, asked))
    listed_out, listed_lse = simulate(listed, asked)
    for other in (listed_out, simulate(arguments, unasked)[0], simulate(listed, unasked)[0]):
        np.testing.assert_array_equal(np.asarray(other).view(np.uint8), out.view(np.uint8))
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


@pytest.fixture
def broken(monkeypatch):
    """Replace a primitive of the kernel; the simulation starts afresh after the failure."""
    simulated.cache_clear()
    yield functools.partial(monkeypatch.setattr, gpu.plgpu)
    simulated.cache_clear()
    reset_gpu_interpret_mode_state()


@pytest.mark.skipif(not RACES_RAISE, reason="JAX 0.11 prints a race and goes on")
@pytest.mark.parametrize("primitive", ["barrier_wait", "commit_smem"])
def test_a_missing_wait_or_fence_is_found(broken, primitive):
    broken(primitive, lambda *barrier: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        simulate(example(NAMED["hopper_long_chunk"]), NAMED["hopper_long_chunk"])


def test_a_wrong_page_is_found(broken):
    shape = NAMED["hopper_group_1"]
    copy = plgpu.copy_gmem_to_smem

    def copy_the_null_page(source, target, barrier):
        is_tile = source.shape == (hopper.TILE, shape.width)
        copy(source.ref.at[0, 0] if is_tile else source, target, barrier)

    broken("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_close(simulate(arguments, shape), reference(arguments, shape), shape)


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_stages_fit(head_dim):
    width = 2 * head_dim
    taken = gpu.CONSUMERS * gpu.ROWS * head_dim * 2 + gpu.heuristic(width).stages * hopper.tile_bytes(width) + gpu.SMALL
    assert gpu.heuristic(width).stages >= 2 and taken <= hopper.SHARED
