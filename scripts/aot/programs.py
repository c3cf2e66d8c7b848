"""The programs that are compiled for absent chips: every chip's kernels, and a decoder's functions by every backend.

Chips and models are shapes alone: no weight exists, and JAX is imported when the first program is built.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from aot.chips import ATTENTIONS, CHIPS, DECODINGS, Attention, Chip, Decoding
from aot.notebooks import RUNS, Run, configured

TEMPORARY_SHARE = 0.5  # of one layer's pages, in a decoder: a hidden copy needs all of them
KERNEL_SHARE = 0.01  # of the pool, in a kernel by itself
LOADS = ((64, 32768), (8, 131072))  # slots, tokens each
SCORES = {"block_scores": ("llama3_8b", "bundled"), "code_scores": ("llama3_8b",)}  # two KV heads fill no tile of codes
KERNEL_CHUNK = 512
DECODING = ("attention", "rows")  # the kernels of a decode step
ROWS = 5  # of a slot: its newest token and four drafted ones
PART = 128  # tokens of a prompt in one row of a decoder's prefill
NOTEBOOK_CHIP = "TPU v5e"  # that Colab lends
SPARSITY = 8  # of so many blocks a list of the sparse kernel has room for one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowering:
    """A program about to be compiled, the bytes of its page pool, and what is asked of it.

    pool: every array that has an entry for each page, by name; none may be copied whole.
    temporary_bound: bytes its temporaries must stay under. in_place: whether it must write the pool where it lies.
    on_chip: what it takes of the chip's own memories, by the kernel's count, or what the chip holds of a model that is
        split. memory: bytes that the chip has, for arguments, outputs and temporaries.
    """

    lower: Callable[[], Any]
    pool_bytes: int
    pool: dict[str, Any]
    temporary_bound: float
    in_place: bool
    on_chip: str = ""
    memory: float = math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One line of the report. `build` traces nothing yet; one that is not `usual` is compiled only with all."""

    name: str
    chip: str
    build: Callable[[], Lowering]
    usual: bool = True


def programs() -> list[Program]:
    """Return every program to compile: for every chip its kernels, and the decoder's functions by every backend.

    For the chip that notebooks ask for, what they run too.
    By the chip's own kernels the step is compiled within the loop of steps alone.
    What takes long stands before what does not: the last compilers then end together.
    """
    kernels = [
        Program(
            name=f"{attention.name} {kernel} {slots}x{length // 1024}k ({chip.backend})",
            chip=chip.name,
            build=partial(kernel_program, attention, chip, kernel, slots, length),
        )
        for chip in CHIPS
        if chip.backend
        for attention in ATTENTIONS
        for kernel in attention.kernels
        for slots, length in LOADS
    ]
    scores = [
        Program(
            name=f"{attention.name} {function} {slots}x{length // 1024}k ({chip.backend or 'gpu'})",
            chip=chip.name,
            build=partial(scores_program, attention, chip, function, slots, length),
        )
        for chip in CHIPS
        if chip.backend
        for attention in ATTENTIONS
        for function, models in SCORES.items()
        if attention.name in models
        for slots, length in LOADS
    ]
    decoders = [
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
        if function in decoding.functions
    ]
    written = [
        Program(
            name=f"{run.name} {function}",
            chip=chip.name,
            build=partial(notebook_program, run, chip, function),
        )
        for chip in CHIPS
        if chip.name == NOTEBOOK_CHIP
        for run in RUNS
        for function in run.functions
    ]
    return decoders + written + kernels + scores


def kernel_program(attention: Attention, chip: Chip, kernel: str, slots: int, length: int) -> Lowering:
    """Return one kernel by itself: a decode step of every slot, or a chunk at the end of a prompt."""
    import jax
    import jax.numpy as jnp

    from et_jax.decode.eight_bits import dtype_named
    from et_jax.pallas.checks import LANES
    from et_jax.pallas.paged_attention import paged_attention
    from et_jax.pallas.paged_prefill import paged_prefill
    from et_jax.softmax import Softmax

    device = device_of(chip)
    h, k, d, s = attention.num_heads, attention.num_kv_heads, attention.head_dim, chip.page_size
    *bits, kernel = kernel.split()
    dtype = dtype_named(bits[0]) if bits else jnp.bfloat16
    decoding = kernel in DECODING
    b, n, rows = (slots if decoding else 1), length // s, ROWS if kernel == "rows" else 1

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return on_device(jax.ShapeDtypeStruct(shape, jnp.int32), device)

    def floats(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return on_device(jax.ShapeDtypeStruct(shape, dtype), device)

    num_pages = slots * n + 1
    pages = floats(k, num_pages, s, -(-2 * d // LANES) * LANES, dtype=dtype)
    scales = {"kv_scales": floats(k, num_pages, 2, s, dtype=jnp.float32)} if bits else {}
    settings = {"softmax": Softmax(scale=d**-0.5, window=attention.window), "backend": chip.backend}
    if decoding:
        more = scales | ({"readers": integers(b, k, n)} if kernel == "rows" else {})
        lists = (integers(b, n), integers(b, k, n), integers(b, k))
        arguments = (floats(b * rows, h, d), pages, *lists, integers(b * rows), more)

        def decode(q, pages, table, blocks, counts, lengths, more):
            return paged_attention(q, pages, table, blocks, counts, lengths, rows_per_slot=rows, **more, **settings)

        function = decode
    else:
        lists = {"blocks": integers(b, k, n // SPARSITY), "counts": integers(b, k)} if kernel == "sparse" else {}
        arguments = (floats(b, KERNEL_CHUNK, h, d), pages, integers(b, n), integers(b), lists, scales)

        def chunk(q, pages, table, starts, lists, scales):
            return paged_prefill(q, pages, table, starts, **lists, **scales, block_lse=bool(lists), **settings)

        function = chunk

    pool_bytes = math.prod(pages.shape) * pages.dtype.itemsize
    return Lowering(
        lower=lambda: lower_for(device, jax.jit(function), *arguments),
        pool_bytes=pool_bytes,
        pool={"pages": pages} | scales,
        temporary_bound=KERNEL_SHARE * pool_bytes,
        in_place=False,
        on_chip=(on_hopper if chip.backend == "gpu" else on_tpu)(kernel, pages, b, h, n),
    )


def scores_program(attention: Attention, chip: Chip, function: str, slots: int, length: int) -> Lowering:
    """Return the pass over the page summaries of every slot, by itself; the pool is the pages that they stand for."""
    import jax
    import jax.numpy as jnp

    from et_jax.pallas.block_scores import gpu, tpu
    from et_jax.pallas.checks import LANES

    device = device_of(chip)
    h, k, d, s = attention.num_heads, attention.num_kv_heads, attention.head_dim, chip.page_size
    n, width = length // s, -(-2 * d // LANES) * LANES
    num_pages = slots * n + 1

    def on_chip(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return on_device(jax.ShapeDtypeStruct(shape, dtype), device)

    box, mean = (on_chip((k, num_pages, width), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    codes = on_chip((k, num_pages, s * d), jnp.int8)
    read, results = {"block_scores": ((box, mean), 3), "code_scores": ((codes, box), 2)}[function]
    rows = (on_chip((slots, n), jnp.int32), on_chip((slots,), jnp.int32))
    kernels = tpu if chip.backend == "tpu" else gpu
    pool_bytes = k * num_pages * s * width * box.dtype.itemsize
    return Lowering(
        lower=lambda: lower_for(
            device,
            jax.jit(partial(getattr(kernels, function), page_size=s, scale=d**-0.5)),
            on_chip((slots, h, d), jnp.bfloat16),
            *read,
            *rows,
        ),
        pool_bytes=pool_bytes,
        pool={f"summary {i}": array for i, array in enumerate(read)},
        temporary_bound=KERNEL_SHARE * pool_bytes,
        in_place=False,
        on_chip=described(tpu.footprint(tpu.heuristic(*read), read, slots, h, n, results)) if kernels is tpu else "",
    )


def on_tpu(kernel: str, pages: Any, b: int, h: int, n: int) -> str:
    """Return what a kernel takes of a TPU core's vector and scalar memory, for b rows and tables of n pages."""
    from et_jax.pallas.paged_attention import tpu as decode
    from et_jax.pallas.paged_prefill import tpu as prefill

    if kernel in DECODING:
        rows = ROWS if kernel == "rows" else 1
        taken = decode.footprint(decode.heuristic(pages), pages, b, h, n, n, rows, read_apart=rows > 1)
    else:
        group = h // pages.shape[0]
        entries = n // SPARSITY if kernel == "sparse" else 0
        config = prefill.heuristic(KERNEL_CHUNK, group, pages)
        taken = prefill.footprint(config, pages, b, group, n, listed=entries, summed=entries)
    return described(taken)


def described(taken: Any) -> str:
    """Return what a kernel takes of a TPU core's memories, for the report."""
    from et_jax.pallas import ring

    return (
        f"vector {taken.vector / 2**20:.1f} of {ring.VECTOR_MEMORY_BYTES / 2**20:.0f} MiB, "
        f"scalar {taken.scalar / 2**10:.0f} of {ring.SCALAR_MEMORY_BYTES / 2**10:.0f} KiB"
    )


def on_hopper(kernel: str, pages: Any, b: int, h: int, n: int) -> str:
    """Return what the tiles of a kernel take of a multiprocessor's shared memory; its assembler refuses too much."""
    from et_jax.pallas import hopper
    from et_jax.pallas.paged_attention import gpu as decode
    from et_jax.pallas.paged_prefill import gpu as prefill

    k, _, s, e = pages.shape
    queries = h // k * (ROWS if kernel == "rows" else 1)
    config = decode.heuristic(s, queries, e, pages.dtype) if kernel in DECODING else prefill.heuristic(e, pages.dtype)
    taken = config.stages * hopper.tile_bytes(e, pages.dtype)
    return f"tiles {taken / 2**10:.0f} of {hopper.SHARED / 2**10:.0f} KiB shared"


def decoder_program(decoding: Decoding, chip: Chip, function: str, backend: str) -> Lowering:
    """Return one function of a decoder, on shapes that lie on the chip."""
    import jax.numpy as jnp

    from et_jax.models.transformer import abstract

    device, config = device_of(chip), decoder_config(decoding, chip, backend)
    weights = tuple(abstract(one, jnp.bfloat16, decoding.quantize, stacked=config.stacked) for one in config.models)
    lowering = function_program(function, config, weights_on(weights, device), device)
    with traced_for(device):
        return dataclasses.replace(lowering, on_chip=served(config, backend))


def decoder_config(decoding: Decoding, chip: Chip, backend: str, mesh: Any = None) -> Any:
    """Return the configuration of a decoder for a chip, or for several that its model is split over."""
    import jax.numpy as jnp
    import numpy as np

    from et_jax.control.compression import named
    from et_jax.control.presets import preset
    from et_jax.decode.config import DecoderConfig
    from et_jax.decode.draft import Drafting, Pruned
    from et_jax.decode.eight_bits import dtype_named
    from et_jax.models.calibration import Calibration
    from et_jax.models.config import ModelConfig
    from et_jax.models.stacks import stacked_on
    from et_jax.types import Table

    model, *others = (
        ModelConfig(
            num_layers=decoding.num_layers,
            max_positions=decoding.max_length,
            norm_eps=1e-5,
            rope_theta=500000.0,
            **{"architecture": "llama", "windows": (None,) * decoding.num_layers}
            | shape
            | _mixture(shape, decoding.num_layers),
        )
        for shape in (decoding.model, decoding.small)
        if shape is not None
    )
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
        calibration=Calibration(
            sensitivity=Table(np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32))
        ),
        stacked=stacked_on(chip.topology["platform"]),
        mesh=mesh,
    )


def served(config: Any, backend: str) -> str:
    """Return which kernels serve a model's attention, from `backend` on, and score its summaries and its key codes."""
    import jax.numpy as jnp

    from et_jax.decode.backends import scoring_backend, serving_backend

    model, size, bfloat16 = config.of_chip, config.page_size, jnp.bfloat16
    attention, _ = serving_backend(model, size, bfloat16, bfloat16, backend)
    summaries, codes = (scoring_backend(model, size, bfloat16, coded, attention)[0] for coded in (False, True))
    return f"attention {attention}, summaries {summaries}, codes {codes}"


def _mixture(shape: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the experts of a model's shape, in every layer, where it has some."""
    from et_jax.models.config import ClampedSwish, ExpertConfig

    if (given := shape.get("experts")) is None:
        return {}
    given = dict(given)
    clamped = given.pop("clamped", None)
    activation = {} if clamped is None else {"activation": ClampedSwish(**clamped)}
    return {"experts": ExpertConfig(layers=(True,) * num_layers, **given, **activation)}


def notebook_program(run: Run, chip: Chip, function: str) -> Lowering:
    """Return one function of a decoder that a notebook runs, by the best kernels that serve its model on the chip.

    Of its pages it is asked only that they are written in place: all of them fit a vector memory, which XLA uses.
    """
    from et_jax.decode.backends import serving_backend

    device = device_of(chip)
    plain, _ = configured(run, "xla")
    assert chip.backend is not None
    with traced_for(device):
        backend, _ = serving_backend(plain.model, chip.page_size, plain.weights_dtype, plain.cache_dtype, chip.backend)
    config, weights = configured(run, backend)
    lowering = function_program(function, config, weights_on(weights, device), device)
    return dataclasses.replace(lowering, pool={}, temporary_bound=math.inf)


def function_program(function: str, config: Any, params: Any, device: Any) -> Lowering:
    """Return one function of a decoder, on shapes that lie on the device, as those of `params` do."""
    import jax

    from et_jax.decode.compress import compress
    from et_jax.decode.decoder import decode, step
    from et_jax.decode.prefill import prefill
    from et_jax.decode.state import empty

    on_chip = partial(on_device, device=device)
    state = jax.tree.map(on_chip, jax.eval_shape(partial(empty, config)))
    program = {"step": step, "decode": decode, "prefill": prefill, "compress": compress}[function]
    arguments = arguments_of(function, config, params, state, on_chip)
    donated, options = 0 if arguments[0] is state else 1, config.compiler_options(device.platform)
    jitted = jax.jit(partial(program, config), donate_argnums=donated, compiler_options=options)
    pools = tuple(plant.cache for plant in state.plants)
    places = [one for cache in pools for one in cache.layers]
    sizes = [math.prod(one.pages.shape) * one.pages.dtype.itemsize for one in places]
    return Lowering(
        lower=lambda: lower_for(device, jitted, *arguments),
        pool_bytes=sum(sizes),
        pool={jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(pools)},
        temporary_bound=TEMPORARY_SHARE * sizes[0] / places[0].depth,
        in_place=True,
    )


def arguments_of(function: str, config: Any, params: Any, state: Any, put: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return what a function of a decoder is given besides its configuration, shapes that `put` lays somewhere."""
    import jax
    import jax.numpy as jnp

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


def device_of(chip: Chip) -> Any:
    """Return the chip as a device that can be compiled for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(**chip.topology).devices[0]


def on_device(leaf: Any, device: Any) -> Any:
    """Return the shape of an array that lies on the device."""
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def weights_on(weights: Any, device: Any) -> Any:
    """Return the shapes of the weights of models that lie on the device, as loading puts them there."""
    import jax

    from et_jax.models.transformer import Params
    from et_jax.models.weights import by_rows
    from et_jax.types import replace

    def looked_up(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_rows(leaf))

    there = jax.tree.map(lambda leaf: on_device(leaf, device), weights)
    return tuple(
        replace(one, embedding=jax.tree.map(looked_up, one.embedding)) if isinstance(one, Params) else one
        for one in there
    )


def lower_for(device: Any, jitted: Any, *arguments: Any) -> Any:
    """Return the program traced as for the device."""
    with traced_for(device):
        return jitted.lower(*arguments)


def traced_for(device: Any) -> AbstractContextManager[Any]:
    """Return within what things are traced as for the device, which is how the kernels know what chip they are for."""
    import jax

    platform = "cuda" if device.platform == "gpu" else device.platform  # as JAX names it while tracing
    kind = jax.sharding.AbstractDevice(device.device_kind, 1, platform)
    auto = (jax.sharding.AxisType.Auto,)  # nothing is divided: where an axis is explicit, ragged products want it said
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), auto, abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)
