"""What choosing blocks costs, and what it saves: one layer's decode attention, dense and pruned, on this device.

    python scripts/bench_selection.py

Random bfloat16 keys in the shape of a Llama-3-8B layer, a few rows of one length. Timed turn by turn, medians shown:

    contiguous      two products in XLA over the same tokens laid out in order, no pages
    dense           paged attention with every block listed
    quest           choose 1/8 of the blocks by their boxes, list them, read them
    choose quest    the choosing and listing alone
    certified int8  choose from 8-bit codes what provably holds all but half of the mass, list, read
    choose int8     the choosing and listing alone
    by entropy      choose int8 with each head's tolerance by the entropy of its attention, as `certified` reads
    by error        choose by expected error, as `adaptive` reads
    entropy alone   the tolerances of all heads by attention entropy, from scores that are there: what `certified` adds
    error alone     the errors to expect of all blocks, likewise: what `adaptive` adds

Every call but of the last two depends on the one before it. Nothing is asserted.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from et_jax.control.expected_error import ExpectedError, squared_error
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.select import Certified, PerHead, Quest, coded_bounds
from et_jax.control.selector import Selector
from et_jax.control.view import BlockView
from et_jax.decode import cache as kv
from et_jax.decode.reading import list_blocks
from et_jax.decode.selection import Blocks, blocks_of, select, view_of
from et_jax.evidence import tables
from et_jax.pallas.backend import pick
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.softmax import Softmax
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.results import write

HEADS, KV_HEADS, DIM = 32, 8, 128
SHARE = 1 / 8
TOLERANCE = 0.5
ALONE: dict[str, Callable[[BlockView], Array]] = {"entropy alone": AttentionEntropy(), "error alone": squared_error}
CALLS = 4  # in one timed run


def stored(rows: int, length: int, page_size: int, codes: bool) -> tuple[kv.KVCache, Blocks]:
    """Return one layer's cache of random tokens, and the blocks of every row."""
    per_row = length // page_size
    cache = kv.empty(1, KV_HEADS, DIM, rows * per_row + 1, page_size, jnp.bfloat16, key_codes=codes)
    table = jnp.arange(1, rows * per_row + 1, dtype=jnp.int32).reshape(rows, per_row)
    rng = np.random.default_rng(0)

    def tokens() -> Array:
        return jnp.asarray(rng.standard_normal((rows, length, KV_HEADS, DIM), np.float32), jnp.bfloat16)

    start, count = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    layer = jax.jit(kv.write, donate_argnums=0)(cache.layers[0], tokens(), tokens(), table, start, count)
    return kv.KVCache(layers=(layer,), surprisal=None), blocks_of(table, count, page_size, None)


def asked(query: Array) -> tuple[Array, Array]:
    """Return the queries as selection takes them, and the tolerance of every row."""
    grouped = query.astype(jnp.float32).reshape(query.shape[0], KV_HEADS, -1, DIM) * DIM**-0.5
    return grouped, jnp.full(query.shape[0], TOLERANCE, jnp.float32)


def chosen(selector: Selector, query: Array, cache: kv.KVCache, blocks: Blocks) -> tuple[Array, Array]:
    """Return the list of blocks the selector opens, and how many they are."""
    grouped, tolerance = asked(query)
    each = jax.tree.map(lambda number: jnp.full(query.shape[0], number), selector)  # numbers have a row each
    view = view_of(grouped, cache.layers[0], None, blocks, tolerance, pick())
    return list_blocks(select(each, replace(view, sensitivity=jnp.ones(grouped.shape[:3])), blocks).opened)


def every(query: Array, cache: kv.KVCache, blocks: Blocks) -> tuple[Array, Array]:
    """Return the list of every block."""
    shape = (query.shape[0], KV_HEADS, blocks.start.shape[0])
    ids = jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32), shape)
    return ids, jnp.full(shape[:2], shape[2], jnp.int32)


def contestants(num_blocks: int) -> dict[str, Callable[[Array, kv.KVCache, Blocks], tuple[Array, Array]]]:
    """Return what is timed: a query to its output, and to the number of blocks listed."""

    def attend(choose: Callable, query: Array, cache: kv.KVCache, blocks: Blocks) -> tuple[Array, Array]:
        listed, counts = choose(query, cache, blocks)
        pages = cache.layers[0].pages
        softmax = Softmax(scale=DIM**-0.5)
        out, _ = paged_attention(query, pages, blocks.table, listed, counts, blocks.length, softmax=softmax)
        return out, counts

    def only(choose: Callable, query: Array, cache: kv.KVCache, blocks: Blocks) -> tuple[Array, Array]:
        listed, counts = choose(query, cache, blocks)
        return query + (listed[..., :1].sum(axis=1)[:, None] > num_blocks).astype(query.dtype), counts

    few = partial(chosen, Quest(round(SHARE * num_blocks)))
    proved = Certified(coded_bounds)
    sure = partial(chosen, proved)
    return {
        "dense": partial(attend, every),
        "quest": partial(attend, few),
        "choose quest": partial(only, few),
        "certified int8": partial(attend, sure),
        "choose int8": partial(only, sure),
        "by entropy": partial(only, partial(chosen, PerHead(proved, AttentionEntropy()))),
        "by error": partial(only, partial(chosen, ExpectedError())),
    }


def contiguous(query: Array, key: Array, value: Array) -> Array:
    """Return attention over tokens "x t d" laid out in order: two products and a softmax."""
    b = query.shape[0]
    grouped = query.reshape(b * KV_HEADS, -1, DIM)
    scores = jnp.einsum("xgd,xtd->xgt", grouped, key, preferred_element_type=jnp.float32) * DIM**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("xgt,xtd->xgd", weights, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype).reshape(query.shape)


def measure(rows: int, length: int, page_size: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds a call of every contestant, and the share of blocks it listed."""
    cache, blocks = stored(rows, length, page_size, codes=True)
    query = jnp.asarray(np.random.default_rng(1).standard_normal((rows, HEADS, DIM)), jnp.bfloat16)
    order = cache.layers[0].pages[:, blocks.table].transpose(1, 0, 2, 3, 4).reshape(rows * KV_HEADS, length, -1)
    key, value = jnp.array(order[..., :DIM]), jnp.array(order[..., DIM : 2 * DIM])
    del order

    def chain(call: Callable, *given: Any) -> Callable[[], Any]:
        def run(query, given):
            counts = jnp.zeros((rows, KV_HEADS), jnp.int32)
            for _ in range(CALLS):
                result = call(query, *given)
                out, counts = result if isinstance(result, tuple) else (result, counts)
                query = query + jnp.asarray(1e-3, query.dtype) * out
            return query, counts

        compiled = jax.jit(run)
        return lambda: jax.block_until_ready(compiled(query, given))

    runs = {name: chain(call, cache, blocks) for name, call in contestants(length // page_size).items()}
    runs = {"contiguous": chain(contiguous, key, value)} | runs
    listed = {name: float(np.mean(run()[1])) * page_size / length for name, run in runs.items()}
    grouped, tolerance = asked(query)
    view = jax.jit(view_of, static_argnums=5)(grouped, cache.layers[0], None, blocks, tolerance, pick())

    def alone(rule: Callable[[BlockView], Array]) -> Callable[[], Any]:
        compiled = jax.jit(jax.vmap(jax.vmap(rule)))
        jax.block_until_ready(compiled(view))
        return lambda: [jax.block_until_ready(compiled(view)) for _ in range(CALLS)]

    runs |= {name: alone(rule) for name, rule in ALONE.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - began) / CALLS)
    against = np.asarray(times["dense"])
    return {
        "rows": rows,
        "length": length,
        "page_size": page_size,
        "milliseconds": {name: float(np.median(each)) for name, each in times.items()},
        "over_dense": {name: float(np.median(np.asarray(each) / against)) for name, each in times.items()},
        "share_listed": {name: share for name, share in listed.items() if share > 0},
    }


def main() -> None:
    parser = arguments.parser(__doc__, results="selection_cost.json")
    parser.add_argument("--rows", type=arguments.count(), default=2)
    parser.add_argument("--lengths", type=arguments.count(), nargs="+", default=[4096, 16384])
    parser.add_argument("--page-sizes", type=arguments.count(), nargs="+", default=[64, 16])
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="turns of every contestant (default 9)")
    args = parser.parse_args()
    results = [measure(args.rows, length, size, args.rounds) for length in args.lengths for size in args.page_sizes]
    print(tables.selection_cost(results))
    settings = {"rounds": args.rounds, "calls": CALLS, "tolerance": TOLERANCE, "dtype": "bfloat16", "backend": pick()}
    write(args.output, "scripts/bench_selection.py", settings, cases=results)


if __name__ == "__main__":
    main()
