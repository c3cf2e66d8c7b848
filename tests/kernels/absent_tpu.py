"""A TPU that is not here: interpreted strictly on a CPU, or only lowered for."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from ladder import compiled, results, taken

STRICT = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
)
TPU = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu"))


def strictly(function, arguments, **settings):
    """Return what the interpreted kernel gives: copies run late, memory starts as NaN, no race was found."""
    pltpu.reset_tpu_interpret_mode_state()  # a kernel that failed leaves its memory behind
    found = results(function, arguments, interpret=STRICT, **settings)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    return found


def lower(function, arguments, **settings):
    """Lower a kernel for a TPU with nothing but jaxlib."""
    with jax.sharding.use_abstract_mesh(TPU):
        exported = jax.export.export(compiled(function, **settings), platforms=["tpu"])(taken(function, arguments))
    assert "tpu_custom_call" in exported.mlir_module()
