"""The Hopper kernels of the pass over page summaries, without a GPU: simulated, lowered for CUDA, what they refuse."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_block_scores import NAMED, arguments_of, assert_close, poisoned, run

from et_jax.pallas.block_scores import gpu
from et_jax.pallas.block_scores.shapes import Shape, example

KERNELS = {"block": gpu.block_scores, "code": gpu.code_scores}
SIMULATED = {
    "block": ("page_64", "empty_slots", "hopper_dim_128"),
    "code": ("page_64", "hopper_dim_128", "page_128"),
}
RACES_RAISE = hasattr(plgpu.InterpretGPUParams(), "on_race")


def simulate(name: str, arguments, shape: Shape):
    """What a kernel returns on the CPU, as float64 numpy; it raises on a race, memory begins as NaN."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    score = jax.jit(lambda arrays: KERNELS[name](**arrays, **shape.settings, interpret=interpret))
    return [np.asarray(x, np.float64) for x in score(arguments_of(name, arguments))]


@pytest.mark.parametrize("name", KERNELS)
def test_simulated_equals_reference(name, capsys):
    for case in SIMULATED[name]:
        shape = NAMED[case]
        arguments = poisoned(example(shape), shape)
        assert_close(simulate(name, arguments, shape), run(name, arguments, shape, "reference"))
    with capsys.disabled():
        print(f"\n{name}_scores gpu, simulated = reference: {len(SIMULATED[name])} shapes")


@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_cuda(name):
    for case in SIMULATED[name]:
        function = jax.jit(functools.partial(KERNELS[name], **NAMED[case].settings))
        module = export.export(function, platforms=["cuda"])(**arguments_of(name, example(NAMED[case]))).mlir_module()
        assert "mosaic_gpu" in module


@pytest.fixture
def broken(monkeypatch):
    """Replace a primitive of the kernel; the simulation starts afresh after the failure."""
    yield functools.partial(monkeypatch.setattr, gpu.plgpu)
    reset_gpu_interpret_mode_state()


@pytest.mark.skipif(not RACES_RAISE, reason="JAX 0.11 prints a race and goes on")
@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_wait_is_found(name, broken):
    broken("barrier_wait", lambda barrier: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        simulate(name, example(NAMED["hopper_dim_128"]), NAMED["hopper_dim_128"])


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_page_is_found(name, broken):
    shape = NAMED["hopper_dim_128"]
    copy = plgpu.copy_gmem_to_smem
    whole = {"block": (1, 2 * shape.head_dim), "code": (shape.page_size, shape.head_dim)}[name]

    def copy_the_null_page(source, target, barrier):
        wrong = source.ref.at[0, :1] if name == "block" else source.ref.at[0, 0]
        copy(wrong if source.shape == whole else source, target, barrier)

    broken("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_close(simulate(name, arguments, shape), run(name, arguments, shape, "reference"))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("block", {"head_dim": 96}, "has registers for head dims of 64 and 128, not 96"),
        ("code", {"page_size": 16}, "reads codes of whole tiles of 64 tokens, not of 16"),
        ("code", {"num_heads": 18}, "has columns for 8 query heads a KV head, not 9"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(name, change, reason):
    shape = dataclasses.replace(NAMED["hopper_dim_128"], **change)
    with pytest.raises(NotImplementedError) as caught:
        KERNELS[name](**arguments_of(name, example(shape)), **shape.settings)
    assert str(caught.value) == f'backend "gpu" {reason}: use "xla"'
