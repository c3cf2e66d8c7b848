"""The Hopper kernels, without a GPU: simulated on the CPU, lowered for CUDA, and what they refuse.

Those that score blocks are interpreted. The simulation of the others has copies, barriers and a detector of races; it
raises on a race and on a read out of bounds, and memory begins as NaN. It has no wgmma: the products are plain ones.
"""

import jax
import jax.numpy as jnp
import pytest
from cases import ATTENTION, BLOCK, CODE, PREFILL, each, kernel
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from ladder import compiled, lowered_for_cuda, results, taken

from et_jax.pallas import hopper
from et_jax.pallas.paged_attention import gpu as attention
from et_jax.pallas.paged_prefill import gpu as prefill

SIMULATION = plgpu.InterpretGPUParams(detect_races=True)
# A shape for each path, raced and poisoned: one tile a page and two, eight columns and sixteen, each head dim, several
# parts, empty slots, what changes the scores, pools in 8 bits, several rows a slot; several blocks of queries, lists.
PATHS = {
    "paged_attention": [
        *("dim_128_bfloat16", "hopper_group_16", "hopper_dim_256", "hopper_empty_slots", "hopper_window"),
        *("hopper_all_of_them", "hopper_int8_all_of_them", "hopper_rows", "hopper_rows_split"),
        *("hopper_rows_all_of_them", "fp8_page_64"),
    ],
    "paged_prefill": [
        *("hopper_group_3", "hopper_dim_256", "hopper_ragged", "hopper_long_chunk", "hopper_window"),
        *("hopper_block_sums", "hopper_sparse_all_of_them", "hopper_int8", "hopper_fp8"),
    ],
    "block_scores": ["page_64", "empty_slots", "hopper_dim_128"],
    "code_scores": ["page_64", "hopper_dim_128", "page_128"],
}
# Simulated with every run; the others by the slow tests.
QUICK = {"dim_128_bfloat16", "hopper_empty_slots", "hopper_dim_256", "hopper_dim_128"}


def run(operation, arguments, shape, **more):
    """What a kernel returns on the CPU, as NumPy."""
    interpret = True if operation in (BLOCK, CODE) else SIMULATION  # Triton has no simulation
    return results(kernel(operation, "gpu"), arguments, interpret=interpret, **shape.settings, **more)


def lower(operation, shape, **more) -> None:
    """Lower a kernel for CUDA with nothing but jaxlib."""
    function = kernel(operation, "gpu")
    text = lowered_for_cuda(compiled(function, **shape.settings, **more), taken(function, operation.example(shape)))
    assert ("triton" if operation in (BLOCK, CODE) else "mosaic_gpu") in text


def is_right(operation, shape, got) -> None:
    expected = results(operation.function, operation.example(shape), backend="reference", **shape.settings)
    operation.assert_close(got, expected, shape)


@each(PATHS, QUICK)
def test_is_the_definition_whatever_stands_where_nothing_is_read(operation, shape):
    is_right(operation, shape, run(operation, operation.poisoned(operation.example(shape), shape), shape))


@each(PATHS)
def test_lowers_for_cuda(operation, shape):
    lower(operation, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "stages"), [(1, 5), (3, 2), (40, 2)])
def test_any_config_gives_the_same(part, stages):
    shape = ATTENTION.shapes["hopper_sparse"]
    config = attention.Config(part=part, stages=stages)
    is_right(ATTENTION, shape, run(ATTENTION, ATTENTION.example(shape), shape, config=config))


# What the simulation finds.


@pytest.fixture
def anew():
    """The simulation starts afresh before and after the test, which makes it fail."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()
    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.mark.skipif(not hasattr(SIMULATION, "on_race"), reason="JAX 0.11 prints a race and goes on")
@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("operation", "name", "primitive"),
    [
        (ATTENTION, "hopper_group_1", "barrier_wait"),
        (ATTENTION, "hopper_parts", "commit_smem"),
        (PREFILL, "hopper_long_chunk", "barrier_wait"),
        (PREFILL, "hopper_long_chunk", "commit_smem"),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_missing_wait_or_fence_is_found(monkeypatch, operation, name, primitive):
    """A consumer that does not wait races with the copy; without a fence a copy overtakes the reads before it."""
    shape = operation.shapes[name]
    monkeypatch.setattr(plgpu, primitive, lambda *barrier: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(operation, operation.example(shape), shape)


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_partial_results_take_little_and_stages_fit(page_size, head_dim, dtype):
    in_8_bits = dtype != jnp.bfloat16
    width = 2 * head_dim
    tile, converted = hopper.tile_bytes(width, dtype), hopper.tile_bytes(width) if in_8_bits else 0
    for group in (1, 8, 9, 16, 20, 32):
        config = attention.heuristic(page_size, group, width, dtype)
        tokens = config.part * page_size
        sums_a_column = head_dim + 2 + tokens // hopper.TILE  # of values, the maximum, the total, each tile's own sum
        in_bfloat16 = tokens * width * jnp.dtype(jnp.bfloat16).itemsize
        assert 4 * sums_a_column < 0.013 / attention.COLUMNS * in_bfloat16
        assert config.part == attention.heuristic(page_size, 1, width, dtype).part
        assert config.stages >= attention.DEEP
        assert config.stages * tile + converted + attention.SMALL <= hopper.SHARED
    queries, stages = prefill.CONSUMERS * prefill.ROWS * head_dim * 2, prefill.heuristic(width, dtype).stages
    assert stages >= 2 and queries + stages * tile + converted + prefill.SMALL <= hopper.SHARED
