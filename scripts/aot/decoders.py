"""The functions of decoders as programs, by every backend, on shapes that lie on a chip."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from aot.chips import CHIPS, CONTROL, DECODINGS, HOPPER, KERNELS, TPU_KERNELS, V5E, Chip, Decoding
from aot.programs import Lowering, Program, by_path, device_of, lower_for, on_device, traced_for
from jax.sharding import Mesh

from et_jax.control.compression import named
from et_jax.control.presets import preset
from et_jax.decode.backends import scoring_backend, serving_backend
from et_jax.decode.cache.compress import compress
from et_jax.decode.cache.eight_bits import dtype_named
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode, in_float32, step
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.decode.prefill import prefill
from et_jax.decode.state import empty
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params, abstract
from et_jax.models.sharding import with_copies
from et_jax.models.stacks import stacked_on, stacks_of
from et_jax.models.weights import by_rows, num_bytes
from et_jax.types import Table, replace

TEMPORARY_SHARE = 0.5  # of one layer's pages: a hidden copy needs all of them
PART = 128  # tokens of a prompt in one row of a prefill


def decoder_programs() -> list[Program]:
    """Return the functions of every decoder, for every chip by XLA's attention and by the chip's own kernels.

    By the chip's own kernels the step is compiled within the loop of steps alone.
    """
    return [
        Program(
            name=f"{decoding.name} {function} ({backend})",
            chip=chip.name,
            build=partial(decoder_program, decoding.for_chip(chip), chip, function, backend),
            usual=chip.name not in decoding.seldom,
        )
        for chip in CHIPS
        for backend, functions in (("xla", ("step", "prefill")), (chip.backend, ("decode", "prefill", "compress")))
        if backend
        for decoding in DECODINGS
        if decoding.by_xla or backend != "xla"
        for function in functions
        if function in decoding.for_chip(chip).functions
    ]


def decoder_program(decoding: Decoding, chip: Chip, function: str, backend: str) -> Lowering:
    """Return one function of a decoder, on shapes that lie on the chip."""
    device, config = device_of(chip), decoder_config(decoding, chip, backend)
    stacked = stacked_on(chip.topology["platform"])
    weights = tuple(abstract(one, jnp.bfloat16, decoding.quantize, stacked=stacked) for one in config.models)
    lowering = function_program(function, config, weights_on(weights, device), device)
    loops = any(stack.depth > 1 for stack in stacks_of(config.model))
    counts = {}
    if function == "decode" and loops and chip.name == HOPPER:
        kernels, per_step = KERNELS.get(decoding.name, (0, 0))
        counts = {"kernels": kernels, "step_kernels": per_step, "control": CONTROL.get(decoding.name, 0)}
    elif function == "decode" and chip.name == V5E and decoding.name in TPU_KERNELS:
        counts = {"kernels": TPU_KERNELS[decoding.name], "control": 1}
    with traced_for(device):
        return dataclasses.replace(lowering, on_chip=served(config, backend), **counts)


def decoder_config(decoding: Decoding, chip: Chip, backend: str, mesh: Mesh | None = None) -> DecoderConfig:
    """Return the configuration of a decoder for a chip, or for several that its model is split over."""
    layers = decoding.num_layers

    def shaped(shape: dict[str, Any]) -> ModelConfig:
        own = {"architecture": "llama", "windows": (None,) * layers} | shape
        if "experts" in own:
            own["experts"] = dataclasses.replace(own["experts"], layers=(True,) * layers)
        sizes = {"num_layers": layers, "max_positions": decoding.max_length}
        return ModelConfig(norm_eps=1e-5, rope_theta=500000.0, **sizes | own)

    model, *others = (shaped(shape) for shape in (decoding.model, decoding.small) if shape is not None)
    model = model if mesh is None else with_copies(model, mesh.size)
    controller, budget = preset(decoding.control), decoding.cache_budget
    part = PART if controller.budget is None else controller.budget.segment
    return DecoderConfig(
        model=model,
        num_slots=decoding.num_slots,
        batch=decoding.num_slots,
        page_size=chip.page_size,
        num_pages=decoding.num_slots * decoding.max_length // chip.page_size + 1,
        max_length=decoding.max_length,
        prefill_batch=decoding.prefill_batch,
        chunk=part,
        max_steps=32,
        cache_dtype=dtype_named(decoding.cache_dtype),
        dtype=jnp.bfloat16,
        quantize=decoding.quantize,
        backend=backend,
        controller=controller,
        draft=Drafting(most=decoding.drafts, drafter=None if others else Pruned()) if decoding.drafts else None,
        others=tuple(others),
        compression=None if budget is None else named("latent", budget, every=budget // 4),
        calibration=Calibration(sensitivity=Table(_drawn(model.num_layers, model.num_kv_heads, model.group_size))),
        mesh=mesh,
    )


def _drawn(*shape: int) -> np.ndarray:
    """Numbers that differ, as measured ones do: XLA fills an array of equal numbers in every layer."""
    return np.random.default_rng(0).random(shape, np.float32)


def served(config: DecoderConfig, backend: str) -> str:
    """Return which kernels serve a model's attention, from `backend` on, and score its summaries and its key codes."""
    model, size, bfloat16 = config.of_chip, config.page_size, jnp.bfloat16
    attention, _ = serving_backend(model, size, bfloat16, bfloat16, backend)
    summaries, codes = (scoring_backend(model, size, bfloat16, coded, attention)[0] for coded in (False, True))
    return f"attention {attention}, summaries {summaries}, codes {codes}"


def function_program(function: str, config: DecoderConfig, params: Any, device: Any) -> Lowering:
    """Return one function of a decoder, on shapes that lie on the device, as those of `params` do."""
    on_chip = partial(on_device, device=device)
    state = jax.tree.map(on_chip, jax.eval_shape(partial(empty, config)))
    program = {"step": step, "decode": decode, "prefill": prefill, "compress": compress}[function]
    arguments = arguments_of(function, config, params, state, on_chip)
    donated, options = 0 if arguments[0] is state else 1, config.compiler_options(device.platform)
    program = in_float32(program) if device.platform in ("gpu", "cuda") else program
    jitted = jax.jit(partial(program, config), donate_argnums=donated, compiler_options=options)
    pools = tuple(plant.cache for plant in state.plants)
    places = [one for cache in pools for one in cache.layers]
    return Lowering(
        lower=lambda: lower_for(device, jitted, *arguments),
        pool_bytes=num_bytes([one.pages for one in places]),
        pool=by_path(pools),
        temporary_bound=TEMPORARY_SHARE * num_bytes(places[0].pages) / places[0].depth,
        in_place=True,
    )


def arguments_of(
    function: str, config: DecoderConfig, params: Any, state: Any, put: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """Return what a function of a decoder is given besides its configuration, shapes that `put` lays somewhere."""

    def array(dtype: Any, *shape: int) -> Any:
        return put(jax.ShapeDtypeStruct(shape, dtype))

    count, integer = config.prefill_batch // config.chunk, array(jnp.int32)
    rows, tokens = array(jnp.int32, count), array(jnp.int32, count, config.chunk)
    return {
        "step": (params, state),
        "decode": (params, state, integer),
        "prefill": (params, state, rows, tokens, rows, array(jnp.bool_, count)),
        "compress": (state, integer),
    }[function]


def weights_on(weights: Any, device: Any) -> Any:
    """Return the shapes of the weights of models that lie on the device, as loading puts them there."""

    def looked_up(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_rows(leaf))

    there = jax.tree.map(lambda leaf: on_device(leaf, device), weights)
    return tuple(
        replace(one, embedding=jax.tree.map(looked_up, one.embedding)) if isinstance(one, Params) else one
        for one in there
    )
