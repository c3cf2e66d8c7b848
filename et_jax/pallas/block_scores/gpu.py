"""`block_scores` and `code_scores` for GPUs of compute capability 9.0, in Pallas by Triton.

A program processes one KV head of one row and a few blocks. Summaries are multiplied in float32. Codes are 8-bit
integers, which bfloat16 represents exactly, so that tensor cores multiply them: a query times the steps of its page is
split into three bfloat16 parts, together as exact as float32, which are columns of one product. Past a row's end the
null page is read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.hopper import unsupported
from et_jax.softmax import capped, finite

BLOCKS = 32  # of a program that scores summaries
CODED = 8  # blocks of a program that scores codes, one after the other
PARTS = 4  # of a query in bfloat16, the last of them 0: columns come in powers of two
COLUMNS = 16  # the fewest columns of a product
HEAD_DIMS = (64, 128)  # whose summaries fit in registers


def block_scores(
    q: Float[Array, "b h d"],
    key_box: Float[Array, "k p e"],
    mean: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    interpret: bool = False,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.block_scores` documents. `interpret` runs the kernel on a CPU, for tests."""
    b, h, d = q.shape
    k, n = key_box.shape[0], page_table.shape[1]
    _refuse_unsupported(d)
    result = jax.ShapeDtypeStruct((b, h, n), jnp.float32)
    low, high, middle = pl.pallas_call(
        functools.partial(_score_blocks, group=h // k, page_size=page_size, scale=scale, depth=depth),
        grid=(-(-n // BLOCKS), k, b),
        out_shape=(result,) * 3,
        interpret=interpret,
        name="block_scores",
        **_compiled(interpret, num_warps=4),
    )(q, key_box, mean, page_table, lengths, turn)
    return low, high, middle


def code_scores(
    q: Float[Array, "b h d"],
    key_codes: Int8[Array, "k p r w"],
    key_box: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    interpret: bool = False,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.code_scores` documents. `interpret` is as in `block_scores`."""
    b, h, d = q.shape
    k, p, _ = key_box.shape
    n, s, g = page_table.shape[1], page_size, h // k
    _refuse_unsupported(d)
    if s < COLUMNS or s & (s - 1):
        raise unsupported(f"reads codes of pages of a power of two from {COLUMNS} tokens on, not of {s}")
    result = jax.ShapeDtypeStruct((b, h, n), jnp.float32)
    block_lse, error, mean = pl.pallas_call(
        functools.partial(_score_codes, group=g, scale=scale, soft_cap=soft_cap, depth=depth),
        grid=(-(-n // CODED), k, b),
        out_shape=(result,) * 3,
        interpret=interpret,
        name="code_scores",
        **_compiled(interpret, num_warps=4, num_stages=3),
    )(q, key_codes.reshape(k, p, s, d), key_box, page_table, lengths, turn)
    return block_lse, error, mean


def _refuse_unsupported(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise unsupported(f"has registers for head dims of {HEAD_DIMS[0]} and {HEAD_DIMS[1]}, not {head_dim}")


def _compiled(interpret: bool, **settings: int) -> dict[str, Any]:
    return {} if interpret else {"compiler_params": plt.CompilerParams(**settings)}


def _score_blocks(
    # inputs, in global memory
    q_ref,
    box_ref,
    mean_ref,
    table_ref,
    lengths_ref,
    turn_ref,
    # outputs, in global memory
    low_ref,
    high_ref,
    middle_ref,
    *,
    group: int,
    page_size: int,
    scale: float,
    depth: int,
):
    """Score some blocks of one row and KV head; indices past the end of the table are clamped to its last entry."""
    tile, head, row = (pl.program_id(axis) for axis in range(3))
    d, n = q_ref.shape[2], table_ref.shape[1]
    block = jnp.minimum(tile * BLOCKS + lax.broadcasted_iota(jnp.int32, (BLOCKS,), 0), n - 1)
    valid = block * page_size < lengths_ref[row]
    page = jnp.where(valid, table_ref[row, block], 0) + _first_page(box_ref, turn_ref, depth)
    channel = lax.broadcasted_iota(jnp.int32, (BLOCKS, d), 1)
    pages = lax.broadcast_in_dim(page, (BLOCKS, d), [0])
    least, most = (box_ref[head, pages, first + channel].astype(jnp.float32) for first in (0, d))
    mean = mean_ref[head, pages, channel]
    for place in range(group):
        query = q_ref[row, head * group + place, lax.broadcasted_iota(jnp.int32, (d,), 0)].astype(jnp.float32) * scale
        query = lax.broadcast_in_dim(query, (BLOCKS, d), [1])
        at_min, at_max = query * least, query * most
        found = jnp.minimum(at_min, at_max), jnp.maximum(at_min, at_max), query * mean
        for ref, each in zip((low_ref, high_ref, middle_ref), found, strict=True):
            ref[row, head * group + place, block] = jnp.where(valid, jnp.sum(each, axis=1), -jnp.inf)


def _score_codes(
    # inputs, in global memory
    q_ref,
    codes_ref,
    box_ref,
    table_ref,
    lengths_ref,
    turn_ref,
    # outputs, in global memory
    lse_ref,
    error_ref,
    mean_ref,
    *,
    group: int,
    scale: float,
    soft_cap: float | None,
    depth: int,
):
    """Score some blocks of one row and KV head, one after the other."""
    tile, head, row = (pl.program_id(axis) for axis in range(3))
    s, d = codes_ref.shape[2:]
    n, length = table_ref.shape[1], lengths_ref[row]
    heads = max(COLUMNS // PARTS, 1 << (group - 1).bit_length())  # some of them repeat the last
    columns = PARTS * heads
    column, channel = (lax.broadcasted_iota(jnp.int32, (columns, d), axis) for axis in (0, 1))
    query_head = head * group + jnp.minimum(lax.rem(column, heads), group - 1)
    query = q_ref[row, query_head, channel].astype(jnp.float32) * scale
    part = lax.div(column, heads)
    own = jnp.minimum(lax.broadcasted_iota(jnp.int32, (heads,), 0), group - 1)

    def score(i, _):
        block = jnp.minimum(tile * CODED + i, n - 1)
        end = jnp.clip(length - block * s, 0, s)
        page = jnp.where(end > 0, table_ref[row, block], 0) + _first_page(box_ref, turn_ref, depth)
        place = lax.broadcasted_iota(jnp.int32, (d,), 0)
        least, most = (box_ref[head, page, first + place].astype(jnp.float32) for first in (0, d))
        step = (most - least) / 255.0
        stepped = query * lax.broadcast_in_dim(step, query.shape, [1])
        offset = jnp.sum(query * lax.broadcast_in_dim(least + 128.0 * step, query.shape, [1]), axis=1)
        first, rest = _split(stepped)
        second, rest = _split(rest)
        third, _ = _split(rest)
        parts = jnp.where(part == 0, first, jnp.where(part == 1, second, jnp.where(part == 2, third, 0.0)))
        codes = codes_ref[head, page].astype(jnp.bfloat16)
        scores = lax.dot_general(
            codes, parts.astype(jnp.bfloat16), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = jnp.sum(scores.reshape(s, PARTS, heads), axis=1)
        offset = jnp.max(offset.reshape(PARTS, heads), axis=0)  # equal in all parts
        scores = capped(scores + lax.broadcast_in_dim(offset, scores.shape, [1]), soft_cap)
        token = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        average = jnp.sum(jnp.where(token < end, scores, 0.0), axis=0) / jnp.maximum(end, 1).astype(jnp.float32)
        scores = jnp.where(token < end, scores, -jnp.inf)
        top = finite(jnp.max(scores, axis=0))
        total = jnp.sum(jnp.exp(scores - lax.broadcast_in_dim(top, scores.shape, [1])), axis=0)
        doubt = jnp.max(jnp.sum(jnp.abs(stepped), axis=1).reshape(PARTS, heads), axis=0)
        lse_ref[row, head * group + own, block] = top + jnp.log(total)
        error_ref[row, head * group + own, block] = jnp.where(end > 0, 0.5 * doubt, 0.0)
        mean_ref[row, head * group + own, block] = average

    lax.fori_loop(0, CODED, score, None)


def _first_page(pool_ref: Any, turn_ref: Any, depth: int) -> Any:
    """Return the first page of a layer in a pool that `depth` layers share."""
    return 0 if turn_ref is None else turn_ref[0] * (pool_ref.shape[1] // depth)


def _split(x: Float[Array, "*x"]) -> tuple[Float[Array, "*x"], Float[Array, "*x"]]:
    """Return numbers rounded to bfloat16, and the remainders."""
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    return rounded, x - rounded
