"""The kernels of every chip as programs by themselves, and what each takes of the chip's own memories."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from aot.chips import ATTENTIONS, CHIPS, Attention, Chip
from aot.programs import Lowering, Program, device_of, lower_for, on_device

from et_jax.decode.cache.eight_bits import dtype_named
from et_jax.models.weights import num_bytes
from et_jax.pallas import hopper, ring
from et_jax.pallas.block_scores import gpu as gpu_scores
from et_jax.pallas.block_scores import tpu as tpu_scores
from et_jax.pallas.checks import code_rows, padded_width
from et_jax.pallas.paged_attention import gpu as gpu_attention
from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_attention import tpu as tpu_attention
from et_jax.pallas.paged_prefill import gpu as gpu_prefill
from et_jax.pallas.paged_prefill import paged_prefill
from et_jax.pallas.paged_prefill import tpu as tpu_prefill
from et_jax.softmax import Softmax

SHARE = 0.01  # of the pool, which temporaries must stay under
PARTS = 0.016  # the same on Hopper, in decode for every eight queries that share a head: what the parts of lists end in
LOADS = ((64, 32768), (8, 131072))  # slots, tokens each
SCORES = {"block_scores": ("llama3_8b", "bundled"), "code_scores": ("llama3_8b",)}  # slices compile those of one head
CHUNK = 512
DECODING = ("attention", "rows")  # the kernels of a decode step
ROWS = 5  # of a slot: its newest token and four drafted ones
SPARSITY = 8  # of so many blocks a list of the sparse kernel has room for one


def kernel_programs() -> list[Program]:
    """Return the kernels of every chip that has its own: those of attention, then those that score blocks."""
    attending = {attention.name: attention.kernels for attention in ATTENTIONS}
    scoring = {name: tuple(one for one, models in SCORES.items() if name in models) for name in attending}
    return [
        Program(
            name=f"{attention.name} {kernel} {slots}x{length // 1024}k ({chip.backend})",
            chip=chip.name,
            build=partial(build, attention, chip, kernel, slots, length),
        )
        for build, kernels in ((attention_program, attending), (scores_program, scoring))
        for chip in CHIPS
        if chip.backend
        for attention in ATTENTIONS
        for kernel in kernels[attention.name]
        for slots, length in LOADS
    ]


def attention_program(attention: Attention, chip: Chip, kernel: str, slots: int, length: int) -> Lowering:
    """Return one kernel of attention by itself: a decode step of every slot, or a chunk at the end of a prompt."""
    device = device_of(chip)
    h, k, d, s = attention.num_heads, attention.num_kv_heads, attention.head_dim, chip.page_size
    *bits, kernel = kernel.split()
    dtype = dtype_named(bits[0]) if bits else jnp.bfloat16
    decoding = kernel in DECODING
    b, n, rows = (slots if decoding else 1), length // s, ROWS if kernel == "rows" else 1

    integers, floats = (partial(array_on, device, kind) for kind in (jnp.int32, jnp.bfloat16))
    num_pages = slots * n + 1
    pages = array_on(device, dtype, k, num_pages, s, padded_width(d))
    scales = {"kv_scales": array_on(device, jnp.float32, k, num_pages, 2, s)} if bits else {}
    settings = {"softmax": Softmax(scale=d**-0.5, window=attention.window), "backend": chip.backend}
    by_parts = decoding and chip.backend == "gpu"
    share = PARTS * gpu_attention.columns(rows * h // k) / gpu_attention.COLUMNS if by_parts else SHARE
    if decoding:
        more = scales | ({"readers": integers(b, k, n)} if kernel == "rows" else {})
        lists = (integers(b, n), integers(b, k, n), integers(b, k))
        arguments = (floats(b * rows, h, d), pages, *lists, integers(b * rows), more)

        def decode(q, pages, table, blocks, counts, lengths, more):
            return paged_attention(q, pages, table, blocks, counts, lengths, rows_per_slot=rows, **more, **settings)

        function = decode
    else:
        lists = {"blocks": integers(b, k, n // SPARSITY), "counts": integers(b, k)} if kernel == "sparse" else {}
        arguments = (floats(b, CHUNK, h, d), pages, integers(b, n), integers(b), lists, scales)

        def chunk(q, pages, table, starts, lists, scales):
            return paged_prefill(q, pages, table, starts, **lists, **scales, block_lse=bool(lists), **settings)

        function = chunk
    return Lowering(
        lower=lambda: lower_for(device, jax.jit(function), *arguments),
        pool_bytes=num_bytes(pages),
        pool={"pages": pages} | scales,
        temporary_bound=share * num_bytes(pages),
        in_place=False,
        on_chip=(on_hopper if chip.backend == "gpu" else on_tpu)(kernel, pages, b, h, n),
    )


def scores_program(attention: Attention, chip: Chip, function: str, slots: int, length: int) -> Lowering:
    """Return the pass over the page summaries of every slot, by itself; the pool is the pages that they stand for."""
    device, kernels = device_of(chip), tpu_scores if chip.backend == "tpu" else gpu_scores
    h, k, d, s = attention.num_heads, attention.num_kv_heads, attention.head_dim, chip.page_size
    n = length // s
    num_pages = slots * n + 1
    integers, floats = (partial(array_on, device, kind) for kind in (jnp.int32, jnp.bfloat16))
    box, mean = (array_on(device, kind, k, num_pages, padded_width(d)) for kind in (jnp.bfloat16, jnp.float32))
    codes = array_on(device, jnp.int8, k, num_pages, *code_rows(s, d))
    read, results = {"block_scores": ((box, mean), 3), "code_scores": ((codes, box), 3)}[function]
    arguments = (floats(slots, h, d), *read, integers(slots, n), integers(slots))
    scores = partial(getattr(kernels, function), page_size=s, scale=d**-0.5)
    taken = ""
    if kernels is tpu_scores:
        taken = told(tpu_scores.footprint(tpu_scores.heuristic(*read), read, slots, h, n, results))
    return Lowering(
        lower=lambda: lower_for(device, jax.jit(scores), *arguments),
        pool_bytes=s * num_bytes(box),
        pool={f"summary {i}": array for i, array in enumerate(read)},
        temporary_bound=SHARE * s * num_bytes(box),
        in_place=False,
        on_chip=taken,
    )


def array_on(device: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an array that lies on the device."""
    return on_device(jax.ShapeDtypeStruct(shape, dtype), device)


def on_tpu(kernel: str, pages: Any, b: int, h: int, n: int) -> str:
    """Return what a kernel takes of a TPU core's vector and scalar memory, for b rows and tables of n pages."""
    if kernel in DECODING:
        rows = ROWS if kernel == "rows" else 1
        config = tpu_attention.heuristic(pages)
        return told(tpu_attention.footprint(config, pages, b, h, n, n, rows, read_apart=rows > 1))
    group = h // pages.shape[0]
    entries = n // SPARSITY if kernel == "sparse" else 0
    config = tpu_prefill.heuristic(CHUNK, group, pages)
    return told(tpu_prefill.footprint(config, pages, b, group, n, listed=entries, summed=entries))


def told(taken: ring.Footprint) -> str:
    """Return what a kernel takes of a TPU core's memories, for the report."""
    return (
        f"vector {taken.vector / 2**20:.1f} of {ring.VECTOR_MEMORY_BYTES / 2**20:.0f} MiB, "
        f"scalar {taken.scalar / 2**10:.0f} of {ring.SCALAR_MEMORY_BYTES / 2**10:.0f} KiB"
    )


def on_hopper(kernel: str, pages: Any, b: int, h: int, n: int) -> str:
    """Return what the tiles of a kernel take of a multiprocessor's shared memory; its assembler refuses too much."""
    k, _, s, e = pages.shape
    queries = h // k * (ROWS if kernel == "rows" else 1)
    if kernel in DECODING:
        config = gpu_attention.heuristic(s, queries, e, pages.dtype)
    else:
        config = gpu_prefill.heuristic(e, pages.dtype)
    taken = config.stages * hopper.tile_bytes(e, pages.dtype)
    return f"tiles {taken / 2**10:.0f} of {hopper.SHARED / 2**10:.0f} KiB shared"
