"""The Hopper kernels of the pass over page summaries, without a GPU: simulated, lowered for CUDA, what they refuse."""

import dataclasses

import pytest
from absent_gpu import finds_the_race, lower, races_raise, simulate
from jax.experimental.pallas import mosaic_gpu as plgpu
from ladder import taken
from test_block_scores import CAP, NAMED, assert_close, assert_equals_reference, formula, poisoned

from et_jax.pallas.block_scores import gpu
from scripts.measuring.kernel_shapes.block_scores import Shape, example

KERNELS = {"block": gpu.block_scores, "code": gpu.code_scores}
SIMULATED = {
    "block": [NAMED[name] for name in ("page_64", "empty_slots", "hopper_dim_128")],
    "code": [NAMED[name] for name in ("page_64", "hopper_dim_128", "page_128")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_simulated_equals_reference(name, rung):
    def check(shape: Shape):
        arguments = poisoned(example(shape), shape)
        assert_equals_reference(simulate(KERNELS[name], arguments, **shape.settings), name, arguments, shape)

    rung(f"{name}_scores gpu, simulated = reference", SIMULATED[name], 3, check)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_cuda(name, rung):
    def check(shape: Shape):
        lower(KERNELS[name], example(shape), **shape.settings)

    rung(f"{name}_scores gpu lowers for cuda", SIMULATED[name], 3, check)


@pytest.mark.slow
def test_codes_are_summed_after_the_cap():
    shape = NAMED["page_64"]
    arguments = example(shape)
    got = simulate(gpu.code_scores, arguments, soft_cap=CAP, **shape.settings)
    assert_close(got, formula("code", arguments, shape, CAP))
    lower(gpu.code_scores, arguments, soft_cap=CAP, **shape.settings)


@races_raise
@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_wait_is_found(name, broken_gpu):
    shape = NAMED["hopper_dim_128"]
    broken_gpu("barrier_wait", lambda barrier: None)
    finds_the_race(KERNELS[name], example(shape), **shape.settings)


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_page_is_found(name, broken_gpu):
    shape = NAMED["hopper_dim_128"]
    copy = plgpu.copy_gmem_to_smem
    whole = {"block": (1, shape.head_dim), "code": (shape.page_size, shape.head_dim)}[name]

    def copy_the_null_page(source, target, barrier):
        wrong = source.ref.at[0, :1, : shape.head_dim] if name == "block" else source.ref.at[0, 0]
        copy(wrong if source.shape == whole else source, target, barrier)

    broken_gpu("copy_gmem_to_smem", copy_the_null_page)
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_equals_reference(simulate(KERNELS[name], arguments, **shape.settings), name, arguments, shape)


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
        KERNELS[name](**taken(KERNELS[name], example(shape)), **shape.settings)
    assert str(caught.value) == f'backend "gpu" {reason}: use "xla"'
