"""`block_scores` and `code_scores` on a TPU: a grid step per row, which copies its pages' summaries through a ring.

A page is copied with all KV heads at once. Its codes consist of full tiles for each head. Its summaries do viewed as
"p k e", and XLA uses that layout for a pool "k p e" where it wastes least: where the heads fill a tile's rows and the
pages do not. Otherwise XLA inserts a transposed copy, of two hundredths of the size of the pages, before the kernel
runs: with one head in bfloat16, of which two share a word, and unless the heads are 1, 2, 4 or a multiple of 8.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import ring, tuned
from et_jax.pallas.checks import LANES, SUBLANES
from et_jax.pallas.ring import PageList, RingConfig
from et_jax.softmax import capped


def heuristic(*pools: Array) -> RingConfig:
    """Return the ring for pages of which each of these pools "k p *x" has a part."""
    return ring.heuristic(LANES, 1, _page_bytes(pools), jnp.dtype(jnp.int8))


def _page_bytes(pools: tuple[Array, ...]) -> int:
    """Return the bytes of vector memory of one page's parts, with heads of summaries padded to full registers."""
    heads = (k + -k % SUBLANES if len(rest) == 1 else k for k, _, *rest in (pool.shape for pool in pools))
    return sum(k * math.prod(pool.shape[2:]) * pool.dtype.itemsize for k, pool in zip(heads, pools, strict=True))


def block_scores(
    q: Float[Array, "b h d"],
    key_box: Float[Array, "k p e"],
    mean: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    config: RingConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.block_scores` documents. `interpret` runs the kernel on a CPU, for tests."""
    d = q.shape[2]

    def score(query: Array, end: Any, box: Array, mean: Array) -> tuple[Array, ...]:
        at_min, at_max = query * _for_queries(query, box[:, :d]), query * _for_queries(query, box[:, d : 2 * d])
        at_mean = query * _for_queries(query, mean[:, :d])
        return _sum(jnp.minimum(at_min, at_max)), _sum(jnp.maximum(at_min, at_max)), _sum(at_mean)

    pass_over = partial(_pass_over, page_size=page_size, scale=scale, config=config, interpret=interpret)
    low, high, middle = pass_over(score, "block_scores", q, (key_box, mean), page_table, lengths, [-jnp.inf] * 3)
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
    config: RingConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.code_scores` documents. `interpret` runs the kernel on a CPU, for tests."""
    d, (k, _, rows, width) = q.shape[2], key_codes.shape
    fewest = SUBLANES * math.lcm(d, LANES) // d  # tokens in full tiles
    if page_size % fewest:
        raise NotImplementedError(
            f'backend "tpu" reads codes of a multiple of {fewest} tokens at head dim {d}, not {page_size}: use "xla"'
        )
    tokens = width // d  # of a row

    def score(query: Array, end: Any, box: Array, codes: Array) -> tuple[Array, ...]:
        least = box[:, :d]
        step = (box[:, d : 2 * d] - least) / 255.0
        offset = _sum(query * _for_queries(query, least + 128.0 * step))
        stepped = query * _for_queries(query, step)
        # every query against the tokens of all heads as stored: only its own head's results count
        row, lane = (lax.broadcasted_iota(jnp.int32, (query.shape[0], k * rows), axis) for axis in (0, 1))
        first = jnp.where(lax.rem(row, k) == lax.div(lane, rows), lax.rem(lane, rows) * tokens, page_size)
        places, summed = [], jnp.zeros_like(offset)
        for place in range(tokens):  # in a row
            against = jnp.pad(stepped, ((0, 0), (place * d, width - (place + 1) * d)))
            each = lax.dot_general(
                against,
                codes,
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            if soft_cap is not None:
                each = capped(each + offset, soft_cap)
            counts = first + place < end
            places.append(jnp.where(counts, each, -jnp.inf))
            summed += _sum(jnp.where(counts, each, 0.0))
        top = jnp.max(functools.reduce(jnp.maximum, places), axis=1, keepdims=True)
        total = functools.reduce(jnp.add, (_sum(jnp.exp(each - top)) for each in places))
        lse, mean = top + jnp.log(total), summed / end.astype(jnp.float32)
        if soft_cap is None:
            lse, mean = offset + lse, offset + mean
        return lse, 0.5 * _sum(jnp.abs(stepped)), mean

    pass_over = partial(_pass_over, page_size=page_size, scale=scale, config=config, interpret=interpret)
    pools, empty = (key_box, key_codes), [-jnp.inf, 0.0, 0.0]
    block_lse, error, mean = pass_over(score, "code_scores", q, pools, page_table, lengths, empty)
    return block_lse, error, mean


def _sum(each: Float[Array, "x d"]) -> Float[Array, "x 1"]:
    return jnp.sum(each, axis=1, keepdims=True)


def _for_queries(query: Float[Array, "gk d"], head: Float[Array, "k d"]) -> Float[Array, "gk d"]:
    """Return the head of each query, where queries are ordered by place in the group, then by KV head."""
    return jnp.concatenate([head] * (query.shape[0] // head.shape[0]))


def _pass_over(
    score: Callable[..., tuple[Array, ...]],
    name: str,
    q: Float[Array, "b h d"],
    pools: tuple[Array, Array],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    empty: list[float],
    *,
    page_size: int,
    scale: float,
    config: RingConfig | None,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "b h n"], ...]:
    """Return the results of `score` for every block, and `empty` for those past the length.

    score: from the scaled queries "gk d" of one row, the number of valid tokens of the page and its rows in each
    pool, head by head, to numbers "gk 1". Queries are ordered by place in the group, then by KV head.
    """
    b, h, d = q.shape
    k, n = pools[0].shape[0], page_table.shape[1]
    if config is None:
        facts = {"page_size": page_size, "head_dim": d, "queries": h // k, "kv_heads": k, "dtype": q.dtype}
        config = tuned.settings(heuristic(*pools), f"{name}/tpu", **facts)
    padded = n + -n % LANES
    taken = footprint(config, pools, b, h, n, len(empty))
    ring.require_memory("scalar", taken.scalar, ring.SCALAR_MEMORY_BYTES, "or fewer blocks a slot")
    ring.require_memory("vector", taken.vector, ring.VECTOR_MEMORY_BYTES, "or fewer blocks a slot")
    query = q.astype(jnp.float32).reshape(b, k, h // k, d).swapaxes(1, 2).reshape(b, h, d) * scale
    num_valid = jnp.minimum((lengths + page_size - 1) // page_size, n)
    table = page_table[:, None]
    views = [pool.swapaxes(0, 1)[None] if pool.ndim == 3 else pool for pool in pools]
    if not interpret:  # else XLA copies a pool that has room there to vector memory, in every layer
        views = [pltpu.with_memory_space_constraint(view, pltpu.HBM) for view in views]

    def row_table(ahead):
        return pl.BlockSpec((1, 1, n), lambda i, *_: (jnp.minimum(i + ahead, b - 1), 0, 0), memory_space=pltpu.SMEM)

    results = pl.pallas_call(
        partial(_kernel, score=score, empty=empty, page_size=page_size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b,),
            in_specs=[
                pl.BlockSpec((1, h, d), lambda i, *_: (i, 0, 0)),
                row_table(0),
                row_table(1),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            ],
            out_specs=[pl.BlockSpec((1, h, padded), lambda i, *_: (i, 0, 0))] * len(empty),
            scratch_shapes=[
                *[pltpu.VMEM((config.depth, config.group, len(x), *x.shape[2:]), x.dtype) for x in views],
                pltpu.SemaphoreType.DMA((config.depth,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((b, h, padded), jnp.float32)] * len(empty),
        # rows run in order on one core, as in `paged_attention`, and the interpreter checks the list of pages
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name=name,
    )(jnp.pad(num_valid, (0, 1)), lengths, query, table, table, *views)
    return tuple(x[..., :n].reshape(b, h // k, k, n).swapaxes(1, 2).reshape(b, h, n) for x in results)


def footprint(config: RingConfig, pools: tuple[Array, ...], b: int, h: int, n: int, num_results: int) -> ring.Footprint:
    """Return the memory used by b rows of h query heads, page tables of n entries and `num_results` results."""
    k, widths = pools[0].shape[0], [math.prod(pool.shape[2:]) for pool in pools]
    padded, rows = n + -n % LANES, h + -h % SUBLANES
    # counts and lengths; the tables of this row and of the next, twice for the prefetch
    scalar = 4 * (2 * b + 1 + 2 * 2 * n)
    # twice: results and queries; once for the page at hand: its parts as float32, and the operands of each query
    vector = 2 * 4 * rows * (num_results * padded + LANES) + 4 * (2 * (k + -k % SUBLANES) + rows) * max(widths)
    return ring.Footprint(scalar=scalar, vector=vector + config.num_bytes(_page_bytes(pools)))


def _kernel(
    # prefetched scalars
    num_valid_ref,
    lengths_ref,
    # inputs
    query_ref,
    table_ref,
    next_table_ref,
    *refs,
    score: Callable[..., tuple[Array, ...]],
    empty: list[float],
    page_size: int,
):
    """Score the blocks of one row. `refs`: two pools; the outputs; buffers, semaphores and the first buffer."""
    pools, outputs, scratch = refs[:2], refs[2 : 2 + len(empty)], refs[2 + len(empty) :]
    row = pl.program_id(0)
    group = scratch[0].shape[1]

    def listed(row, table_ref):
        return PageList(
            head=slice(None),
            num_groups=pl.cdiv(num_valid_ref[row], group),
            count=lambda i: jnp.clip(num_valid_ref[row] - i * group, 0, group),
            page=lambda i, j: table_ref[0, 0, i * group + j],
        )

    own, following = listed(row, table_ref), listed(row + 1, next_table_ref)
    *buffers, arrived, first = scratch
    arrivals = ring.Ring(
        pools=tuple(zip(pools, buffers, strict=True)), arrived=arrived, first_ref=first, own=own, following=following
    )
    arrivals.open(row == 0)
    for output, value in zip(outputs, empty, strict=True):
        output[...] = jnp.full(output.shape, value, jnp.float32)
    query, length = query_ref[0], lengths_ref[row]

    def step(i, _):
        buffer = arrivals.next(i)
        chunk = pl.ds(pl.multiple_of(i * group // LANES * LANES, LANES), LANES)
        place = lax.broadcasted_iota(jnp.int32, (query.shape[0], LANES), 1) - lax.rem(i * group, LANES)

        def score_page(j, results):
            parts = [each[buffer, j].astype(jnp.float32).reshape(-1, each.shape[-1]) for each in buffers]
            end = jnp.minimum(length - (i * group + j) * page_size, page_size)
            found = score(query, end, *parts)
            return [jnp.where(place == j, new, old) for new, old in zip(found, results, strict=True)]

        results = lax.fori_loop(0, own.count(i), score_page, [output[0, :, chunk] for output in outputs])
        for output, result in zip(outputs, results, strict=True):
            output[0, :, chunk] = result

    lax.fori_loop(0, own.num_groups, step, None)
    arrivals.close()
