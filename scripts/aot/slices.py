"""Models that are split over a whole slice of chips that are not here, in full depth: what each chip holds and does."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from aot.chips import BOTH, LLAMA3_8B, LLAMA3_70B, MIXTRAL_8X7B, Chip, Decoding, tpu
from aot.decoders import TEMPORARY_SHARE, arguments_of, decoder_config, served
from aot.programs import Lowering, Program, by_path
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from et_jax.decode.decoder import decoder
from et_jax.decode.sharded import split
from et_jax.decode.state import empty
from et_jax.models.config import ModelConfig
from et_jax.models.params import abstract
from et_jax.models.sharding import AXIS, shardings, weight_specs
from et_jax.models.stacks import stacked_on
from et_jax.models.weights import num_bytes

MEMORY = {"v5e": 16e9, "v6e": 32e9}  # bytes of a chip
_SIZES: dict[str, Any] = {"num_slots": 16, "max_length": 8192, "prefill_batch": 512, "functions": BOTH}
MIXTRAL = Decoding(name="mixtral_8x7b, 32 layers", model=MIXTRAL_8X7B, num_layers=32, **_SIZES)
MIXTRAL_INT8 = dataclasses.replace(MIXTRAL, name="mixtral_8x7b, int8, 32 layers", quantize="int8")
LLAMA = Decoding(name="llama3_8b, 32 layers", model=LLAMA3_8B, num_layers=32, **_SIZES)
LLAMA_PAPER, LLAMA_CERTIFIED = (
    dataclasses.replace(LLAMA, name=f"llama3_8b, {control}, 32 layers", control=control)
    for control in ("paper", "certified")
)
MIXTRAL_CERTIFIED = dataclasses.replace(MIXTRAL, name="mixtral_8x7b, certified, 32 layers", control="certified")
LARGE = Decoding(name="llama3_70b, int8, 80 layers", model=LLAMA3_70B, num_layers=80, quantize="int8", **_SIZES)
# On which slice each is compiled; the last ones, whose paths others take, only where all programs are asked for.
USUAL = (("v5e", "2x4", MIXTRAL_CERTIFIED), ("v6e", "2x4", MIXTRAL))
SELDOM = (
    ("v5e", "4x4", LARGE),
    ("v5e", "2x2", LLAMA),
    *(("v5e", "2x4", one) for one in (MIXTRAL, MIXTRAL_INT8, LLAMA, LLAMA_PAPER, LLAMA_CERTIFIED)),
)
COLLECTIVES = "3 all-reduce"  # of embeddings, and in the loop over layers of attention and feed-forward
# How often a function gathers each chip's likeliest tokens: for Min-k, where a request asks for it, and for the entropy
# that the law of `paper` measures.
LIKELIEST = {("paper", "decode"): 2, (None, "decode"): 1}


def slice_programs() -> list[Program]:
    """Return the functions of every decoder on its slice."""
    found = []
    for case in (*USUAL, *SELDOM):
        kind, shape, decoding = case
        chip = tpu(f"{kind} {shape}", f"{kind}:{shape}")
        found += [
            Program(
                name=f"{decoding.name} {function} ({chip.backend})",
                chip=chip.name,
                build=partial(slice_program, decoding, chip, MEMORY[kind], function),
                usual=case in USUAL,
            )
            for function in decoding.functions
        ]
    return found


def slice_program(decoding: Decoding, chip: Chip, memory: float, function: str) -> Lowering:
    """Return one function of a decoder whose model is split over a slice of chips, on shapes that lie there.

    Its sizes are those of one chip.
    """
    mesh = Mesh(np.array(topologies.get_topology_desc(**chip.topology).devices), (AXIS,))
    assert chip.backend is not None
    config = decoder_config(decoding, chip, chip.backend, mesh)
    everywhere = shardings(mesh, PartitionSpec())

    def put(leaf: Any, sharding: Any = everywhere) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def held(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

    state = jax.eval_shape(partial(empty, config))
    assert isinstance(config.model, ModelConfig)
    weights = abstract(config.model, jnp.bfloat16, decoding.quantize, stacked=stacked_on("tpu"))
    weights = jax.tree.map(put, weights, shardings(mesh, weight_specs(weights, config.model)))
    state = jax.tree.map(put, state, shardings(mesh, split(state)))
    bound, arguments = decoder(config), arguments_of(function, config, (weights,), state, put)
    program = bound.variants[config.full_variant] if function == "decode" else getattr(bound, function)
    own_weights, cache = (jax.tree.map(held, tree) for tree in (weights, state.plants[0].cache))
    pages = num_bytes([place.pages for place in cache.layers])
    gathers = LIKELIEST.get((decoding.control, function), LIKELIEST.get((None, function), 0))

    def lower() -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return program.lower(*arguments)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        kernels = served(config, chip.backend)
    return Lowering(
        lower=lower,
        pool_bytes=pages,
        pool=by_path(cache),
        temporary_bound=TEMPORARY_SHARE * pages / config.model.num_layers,
        in_place=True,
        on_chip=f"{kernels}; {num_bytes(own_weights) / 1e9:.2f} GB of weights, {num_bytes(cache) / 1e9:.2f} of cache",
        memory=memory,
        collectives=(f"{gathers} all-gather, " if gathers else "") + COLLECTIVES,
    )
