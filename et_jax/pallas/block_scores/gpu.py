"""`block_scores` and `code_scores` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program is one warpgroup. It takes one KV head of one row and either 64 blocks, whose summaries it copies row by row
into shared memory, their least, most and mean keys each to a place of its own (of a part of a place the compiler takes
the swizzle of the whole), or one block, whose codes it copies 64 tokens at a time. Rows lie on the 64 rows of a wgmma's
accumulator, so that sums over channels stay within four threads; there is no wgmma: products are float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.hopper import HEAD_DIMS, TILE, store, unserved
from et_jax.softmax import capped, finite

COLUMNS = 8  # the fewest an accumulator has; the queries of a group that share a read of the codes


def block_scores(
    q: Float[Array, "b h d"],
    key_box: Float[Array, "k p e"],
    mean: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.block_scores` documents.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    """
    b, h, d = q.shape
    k, n = key_box.shape[0], page_table.shape[1]
    _refuse_unserved(d)
    held = (lengths + page_size - 1) // page_size
    result = jax.ShapeDtypeStruct((b, h, n + -n % TILE), jnp.float32)
    results = plgpu.kernel(
        functools.partial(_score_blocks, group=h // k),
        out_type=(result,) * 3,
        scratch_types=(
            plgpu.SMEM((TILE, d), key_box.dtype),
            plgpu.SMEM((TILE, d), key_box.dtype),
            plgpu.SMEM((TILE, d), mean.dtype),
            plgpu.Barrier(num_arrivals=3 * TILE),
        ),
        grid=(result.shape[2] // TILE, k, b),
        grid_names=("tile", "head", "row"),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(q.astype(jnp.float32) * scale, key_box, mean, page_table, jnp.minimum(held, n))
    held_mask = (jnp.arange(n, dtype=jnp.int32) < held[:, None])[:, None]
    low, high, middle = (jnp.where(held_mask, x[..., :n], -jnp.inf) for x in results)
    return low, high, middle


def code_scores(
    q: Float[Array, "b h d"],
    key_codes: Int8[Array, "k p c"],
    key_box: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.code_scores` documents. `interpret` is as in `block_scores`."""
    b, h, d = q.shape
    k, p, _ = key_box.shape
    n, s, g = page_table.shape[1], page_size, h // k
    _refuse_unserved(d)
    if s % TILE:
        raise unserved(f"reads codes of whole tiles of {TILE} tokens, not of {s}")
    if g > COLUMNS:
        raise unserved(f"has columns for {COLUMNS} query heads a KV head, not {g}")
    tiles = s // TILE
    result = jax.ShapeDtypeStruct((b, k, n, tiles, COLUMNS), jnp.float32)
    lse = plgpu.kernel(
        functools.partial(_score_codes, group=g, soft_cap=soft_cap),
        out_type=result,
        scratch_types=(plgpu.SMEM((TILE, d), jnp.int8), plgpu.Barrier()),
        grid=(n, k, b),
        grid_names=("block", "head", "row"),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(q.astype(jnp.float32) * scale, key_codes.reshape(k, p, s, d), key_box, page_table, lengths)
    seen_mask = jnp.arange(n * tiles, dtype=jnp.int32).reshape(n, tiles) * TILE < lengths[:, None, None]
    lse = jnp.where(seen_mask[:, None, ..., None], lse, -jnp.inf)
    block_lse = functools.reduce(jnp.logaddexp, (lse[:, :, :, tile, :g] for tile in range(tiles)))
    # sum_c |q_c| (max_c - min_c) is the width of the block's range
    at = {"page_size": page_size, "scale": scale, "interpret": interpret}
    low, high, _ = block_scores(q, key_box, key_box, page_table, lengths, **at)
    error = jnp.where(seen_mask[:, None, :, 0], (high - low) / (2 * 255.0), 0.0)
    return block_lse.swapaxes(2, 3).reshape(b, h, n), error


def _refuse_unserved(d: int) -> None:
    if d not in HEAD_DIMS[:2]:
        raise unserved(f"has registers for head dims of {HEAD_DIMS[0]} and {HEAD_DIMS[1]}, not {d}")


def _score_blocks(
    # inputs, in global memory
    q_ref,
    box_ref,
    mean_ref,
    table_ref,
    held_ref,
    # outputs, in global memory
    low_ref,
    high_ref,
    middle_ref,
    # scratch, in shared memory
    least_ref,
    most_ref,
    means_ref,
    arrived,
    *,
    group: int,
):
    """Score 64 blocks of one row and KV head; past the row's end its last block again, up to a whole tile."""
    row, head, first = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("tile") * TILE
    held, d = held_ref[row], means_ref.shape[1]

    @pl.when(first < held)
    def _():
        def fetch(j, _):
            page = pl.ds(table_ref[row, jnp.minimum(first + j, held - 1)], 1)
            own = pl.ds(j, 1)
            plgpu.copy_gmem_to_smem(box_ref.at[head, page, pl.ds(0, d)], least_ref.at[own], arrived)
            plgpu.copy_gmem_to_smem(box_ref.at[head, page, pl.ds(d, d)], most_ref.at[own], arrived)
            plgpu.copy_gmem_to_smem(mean_ref.at[head, page, pl.ds(0, d)], means_ref.at[own], arrived)

        lax.fori_loop(0, TILE, fetch, None)
        plgpu.barrier_wait(arrived)
        least, most, mean = (_rows(part) for part in (least_ref, most_ref, means_ref))
        for place in range(group):
            query = _below(q_ref.at[row, head * group + place], least.shape)
            at_min, at_max = query * least, query * most
            found = jnp.minimum(at_min, at_max), jnp.maximum(at_min, at_max), query * mean
            for result_ref, each in zip((low_ref, high_ref, middle_ref), found, strict=True):
                store(result_ref.at[row, head * group + place, pl.ds(first, TILE)], jnp.sum(each, axis=1))


def _score_codes(
    # inputs, in global memory
    q_ref,
    codes_ref,
    box_ref,
    table_ref,
    lengths_ref,
    # output, in global memory
    lse_ref,
    # scratch, in shared memory
    tile_ref,
    arrived,
    *,
    group: int,
    soft_cap: float | None,
):
    """Write the log-sum-exp of each 64 tokens of one block, for the queries of one KV head."""
    row, head, block = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("block")
    s, d = codes_ref.shape[2:]
    page, end = table_ref[row, block], lengths_ref[row] - block * s

    def meet(tile, _):
        tokens = codes_ref.at[head, page, pl.ds(tile * TILE, TILE)]
        plgpu.copy_gmem_to_smem(tokens, tile_ref, arrived)
        least = _below(box_ref.at[head, page, pl.ds(0, d)], (TILE, d))
        step = (_below(box_ref.at[head, page, pl.ds(d, d)], (TILE, d)) - least) / 255.0
        plgpu.barrier_wait(arrived)
        key = _rows(tile_ref) * step + (least + 128.0 * step)
        plgpu.commit_smem()  # these reads come before the next copy to this place
        shape = (TILE, COLUMNS)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        scores = plgpu.layout_cast(jnp.full(shape, -jnp.inf, jnp.float32), plgpu.Layout.WGMMA)
        for place in range(group):
            each = jnp.sum(_below(q_ref.at[row, head * group + place], key.shape) * key, axis=1)
            scores = jnp.where(column == place, lax.broadcast_in_dim(capped(each, soft_cap), shape, [0]), scores)
        offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        scores = jnp.where(offset < end - tile * TILE, scores, -jnp.inf)
        top = finite(jnp.max(scores, axis=0))  # there are columns of no query
        total = jnp.sum(jnp.exp(scores - lax.broadcast_in_dim(top, shape, [1])), axis=0)
        store(lse_ref.at[row, head, block, tile], top + jnp.log(total))

    lax.fori_loop(0, jnp.clip((end + TILE - 1) // TILE, 0, s // TILE), meet, None)


def _rows(ref) -> Float[Array, "x y"]:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)


def _below(ref, shape: tuple[int, int]) -> Float[Array, "x y"]:
    """Return a row repeated below itself, as float32."""
    row = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(row, shape, [1])
