"""The kernels of the accelerator that is here, compiled for it and run on it; without one these tests are skipped."""

import jax
import pytest
from ladder import assert_attention_close, compiled, taken
from test_block_scores import assert_close, formula
from test_block_scores import poisoned as with_nan_unheld
from test_block_scores_gpu import SIMULATED
from test_paged_attention import poisoned
from test_paged_attention_gpu import SERVED as ATTENDED
from test_paged_prefill_gpu import SERVED as PREFILLED

from et_jax.pallas.backend import pick, platform
from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_prefill import paged_prefill
from scripts.measuring.kernel_shapes import block_scores as scored
from scripts.measuring.kernel_shapes import paged_attention as attended
from scripts.measuring.kernel_shapes import paged_prefill as prefilled

pytestmark = pytest.mark.skipif(platform() == "cpu", reason="no GPU and no TPU here")


HOPPER = [*ATTENDED, *PREFILLED, *SIMULATED["block"], *SIMULATED["code"]]
"""What the kernels for Hopper are simulated with, and have to serve."""


def on_device(function, arguments, shape, backend):
    """What a backend's kernel returns, run on the device; a shape that it refuses is skipped."""
    run = compiled(function, backend=backend, **shape.settings)
    try:
        with jax.default_matmul_precision("highest"):  # as a decoder has it on a GPU
            return jax.device_get(run(taken(function, arguments)))
    except NotImplementedError as refusal:
        if backend == "gpu" and shape in HOPPER:
            raise
        pytest.skip(str(refusal))


def by_name(shapes):
    return pytest.mark.parametrize("shape", [shape for shape in shapes if shape.tested], ids=lambda shape: shape.name)


def on_cpu(function, arguments, shape):
    """What the definition returns on the CPU: a GPU's own products are of fewer bits."""
    [cpu, *_] = jax.local_devices(backend="cpu")
    arguments = jax.device_put(taken(function, arguments), cpu)
    return jax.device_get(compiled(function, backend="reference", **shape.settings)(arguments))


@pytest.mark.parametrize("backend", sorted({pick(), "xla"}))
@by_name(attended.SHAPES)
def test_decode_attention_equals_the_definition(shape, backend):
    arguments = attended.example(shape)
    got = on_device(paged_attention, poisoned(arguments, shape), shape, backend)
    assert_attention_close(got, on_cpu(paged_attention, arguments, shape), shape.dtype)


@pytest.mark.parametrize("backend", sorted({pick(), "xla"}))
@by_name(prefilled.SHAPES)
def test_prefill_attention_equals_the_definition(shape, backend):
    arguments = prefilled.example(shape)
    got = on_device(paged_prefill, arguments, shape, backend)
    assert_attention_close(got, on_cpu(paged_prefill, arguments, shape), shape.dtype)


@pytest.mark.parametrize("backend", sorted({pick(), "xla"}))
@pytest.mark.parametrize(("name", "function"), [("block", block_scores), ("code", code_scores)])
@by_name(scored.SHAPES)
def test_scores_equal_the_formula(shape, name, function, backend):
    arguments = scored.example(shape)
    got = on_device(function, with_nan_unheld(arguments, shape), shape, backend)
    assert_close(got, formula(name, arguments, shape))
