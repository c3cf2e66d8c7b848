"""A Hopper GPU that is not here: simulated on a CPU, or only lowered for.

The simulation has copies, barriers and a detector of races; it raises on a race and on a read out of bounds, and memory
begins as NaN. It has no wgmma: the products are plain ones here.
"""

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from ladder import compiled, results, taken

SIMULATION = plgpu.InterpretGPUParams(detect_races=True)
reset_gpu_interpret_mode_state = interpret_pallas_call.reset_gpu_interpret_mode_state
races_raise = pytest.mark.skipif(
    not hasattr(plgpu.InterpretGPUParams(), "on_race"), reason="JAX 0.11 prints a race and goes on"
)


def simulate(function, arguments, **settings):
    """What a kernel returns on the CPU, as numpy."""
    return results(function, arguments, interpret=SIMULATION, **settings)


def lower(function, arguments, **settings):
    """Lower a kernel for CUDA with nothing but jaxlib."""
    module = jax.export.export(compiled(function, **settings), platforms=["cuda"])(taken(function, arguments))
    assert "mosaic_gpu" in module.mlir_module()


def finds_the_race(function, arguments, **settings):
    """Whoever reads before a copy has arrived, or writes before a read is over, is told."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        simulate(function, arguments, **settings)
