"""The kernels of the accelerator that is here, compiled for it and run on it; without one these tests are skipped."""

import jax
import pytest
from cases import OPERATIONS
from ladder import compiled, taken
from test_gpu_kernels import PATHS

from et_jax.pallas.backend import pick, platform

pytestmark = pytest.mark.skipif(platform() == "cpu", reason="no GPU and no TPU here")


def on_device(operation, arguments, shape, backend):
    """What a backend's kernel returns, run on the device; a shape that it refuses is skipped."""
    run = compiled(operation.function, backend=backend, **shape.settings)
    try:
        with jax.default_matmul_precision("highest"):  # as a decoder has it on a GPU
            return jax.device_get(run(taken(operation.function, arguments)))
    except NotImplementedError as refusal:
        # what the kernels for Hopper are simulated with they have to serve
        if backend == "gpu" and (shape.name in PATHS[operation.name] or shape.name.startswith("hopper")):
            raise
        pytest.skip(str(refusal))


def on_cpu(operation, arguments, shape):
    """What the definition returns on the CPU: a GPU's own products are of fewer bits."""
    [cpu, *_] = jax.local_devices(backend="cpu")
    arguments = jax.device_put(taken(operation.function, arguments), cpu)
    return jax.device_get(compiled(operation.function, backend="reference", **shape.settings)(arguments))


@pytest.mark.parametrize("backend", sorted({pick(), "xla"}))
@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        pytest.param(operation, shape, id=f"{operation.name}-{name}")
        for operation in OPERATIONS
        for name, shape in operation.shapes.items()
        if shape.tested
    ],
)
def test_is_the_definition_whatever_stands_where_nothing_is_read(operation, shape, backend):
    arguments = operation.example(shape)
    got = on_device(operation, operation.poisoned(arguments, shape), shape, backend)
    operation.assert_close(got, on_cpu(operation, arguments, shape), shape)
