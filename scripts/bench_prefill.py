"""What reading less of a prompt saves of the time it takes, on this device.

    python scripts/bench_prefill.py

A stack of Llama-3-8B's shape, few layers of it, with random weights reads a long prompt segment by segment: densely; at
shares of the blocks before each segment, listed head by head; and with half of the KV heads at 1/16 and half at 1/2,
beside all heads at 9/32, their mean, and at 1/2, the greatest: where work is the sum, that takes what the mean takes.
The attention of a layer (writing the cache and choosing blocks included) is timed alone, for every eighth segment, and
so is the whole prefill. The cases take turns; told are medians of times and of each round's ratios to dense.
"""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from et_jax.control.budget import Budget, ConstantBudget, PromptNotes, begun, greatest
from et_jax.control.segment import Segment
from et_jax.decode import cache as kv
from et_jax.decode.budgeted import Budgeted
from et_jax.decode.chunk import Chunk
from et_jax.decode.extend import attend, extend
from et_jax.decode.plant import Plant, PlantState
from et_jax.evidence import prompt_tables
from et_jax.models.params import Params
from et_jax.models.stacks import located, stacks_of
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.types import replace, static, value
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import LLAMA_3_8B

EVERY = 8  # segments of which one is timed

Carry = tuple[PlantState, PromptNotes]


@value
class Shares(Budget):
    """Every KV head reads its own share of the visible blocks, those of greatest score."""

    of_heads: tuple[float, ...] = static(default=())

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        visible = jnp.sum(segment.visible).astype(jnp.float32)
        count = jnp.round(jnp.asarray(self.of_heads, jnp.float32) * visible).astype(jnp.int32)
        return greatest(segment.score, count, segment.visible), kept


def cases(segment: int, heads: int, layers: int) -> dict[str, Budget]:
    """Return what is timed, by name."""

    def of(*shares: float) -> Budget:
        whole = tuple(np.resize(shares, heads).tolist())
        return Shares(segment=segment, dense_layers=0, dense_until=0, of_heads=whole)

    return {
        "dense": ConstantBudget(segment=segment, dense_layers=layers),
        "all, listed": of(1.0),
        "1/2": of(1 / 2),
        "1/4": of(1 / 4),
        "1/8": of(1 / 8),
        "1/16": of(1 / 16),
        "9/32": of(9 / 32),
        "half of the heads 1/16, half 1/2": of(1 / 16, 1 / 2),
    }


def prefilled(
    plant: Plant, budget: Budget, params: Params, carry: Carry, tokens: Array, start: Array
) -> tuple[Carry, Array]:
    """Return the cache after a segment, and its last logits."""
    state, notes = carry
    reader = Budgeted(budget=budget, last=jnp.zeros(1, bool), notes=notes)
    found, state, notes, _ = extend(plant, params, state, _chunk(plant, tokens, start), reader)
    return (state, notes), found[:, -1]


def attended(
    plant: Plant, budget: Budget, carry: Carry, qkv: tuple[Array, Array, Array], start: Array
) -> tuple[Carry, Array]:
    """Return the cache after a segment of one layer, and what its attention gives."""
    state, notes = carry
    reader = Budgeted(budget=budget, last=jnp.zeros(1, bool), notes=notes)
    chunk = _chunk(plant, jnp.zeros(qkv[0].shape[:2], jnp.int32), start)
    first = located(stacks_of(plant.model, stacked=False), 0)
    cached, of_layer = state.cache.layers[0], reader.of_layer(plant, first)
    out, cached, read = attend(plant, plant.model.softmax(0), chunk, of_layer, *qkv, cached, None)
    return (replace(state, cache=kv.with_place(state.cache, 0, cached)), reader.noted(chunk, (read,))), out


def _chunk(plant: Plant, tokens: Array, start: Array) -> Chunk:
    blocks = plant.model.max_positions // plant.page_size
    zero = jnp.zeros(1, jnp.int32)
    return Chunk(
        slot=zero,
        table=1 + jnp.arange(blocks, dtype=jnp.int32)[None],
        token=tokens,
        position=zero + start,
        start=zero + start,
        count=zero + tokens.shape[1],
        end=zero + start + tokens.shape[1],
    )


def empty(plant: Plant, budget: Budget, dtype: str) -> Carry:
    """Return a cache of zeros and blank notes."""
    c = plant.model
    blocks = c.max_positions // plant.page_size
    cache = kv.empty(c.num_layers, c.num_kv_heads, c.head_dim, blocks + 1, plant.page_size, dtype)
    notes = begun(budget, c.num_layers, c.num_kv_heads, probed=False)
    state = PlantState(cache=cache, num_cached=jnp.zeros(1, jnp.int32))
    return state, jax.tree.map(lambda x: x[None], notes)


def timed(run: Any, *given: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and what it gives."""
    began = time.perf_counter()
    found = jax.block_until_ready(run(*given))
    return time.perf_counter() - began, found


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = arguments.parser(__doc__, results="prefill.json")
    parser.add_argument("--tokens", type=arguments.count(), default=16_384)
    parser.add_argument("--layers", type=arguments.count(), default=1)
    parser.add_argument("--segment", type=arguments.count(), default=512)
    parser.add_argument("--page-size", type=arguments.count(), default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=arguments.count(), default=5, help="of attention (default 5)")
    parser.add_argument("--prefills", type=arguments.count(), default=1, help="rounds of whole prefills (default 1)")
    args = parser.parse_args()
    model = dataclasses.replace(
        LLAMA_3_8B,
        num_layers=args.layers,
        windows=(None,) * args.layers,
        max_positions=args.tokens,
        vocab_size=1024,
    )
    plant = Plant(model=model, page_size=args.page_size, backend=pick(), scores_backend=pick())
    made = cases(args.segment, model.num_kv_heads, model.num_layers)
    starts = range(0, args.tokens, args.segment)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, args.segment, heads, model.head_dim) for heads in (model.num_heads, *[model.num_kv_heads] * 2)]
    qkv = tuple(jax.random.normal(key, shape, args.dtype) for key, shape in zip(keys, shapes, strict=True))

    one = {name: jax.jit(partial(attended, plant, budget), donate_argnums=0) for name, budget in made.items()}
    carries = {name: empty(plant, budget, args.dtype) for name, budget in made.items()}
    for name, run in one.items():  # compiles, and fills the cache
        for start in starts:
            carries[name], _ = run(carries[name], qkv, jnp.int32(start))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.rounds):
        for name, run in one.items():
            spent = 0.0
            for start in starts[EVERY - 1 :: EVERY]:
                took, (carries[name], _) = timed(run, carries[name], qkv, jnp.int32(start))
                spent += took
            seconds[name].append(spent)
    attention = _told(seconds)
    del carries, one

    params = initialise(model, jax.random.key(1), jnp.dtype(args.dtype))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1024, (1, args.segment)), jnp.int32)
    whole = {name: jax.jit(partial(prefilled, plant, budget), donate_argnums=1) for name, budget in made.items()}
    seconds = {name: [] for name in made}
    for name, run in whole.items():
        run(params, empty(plant, made[name], args.dtype), tokens, jnp.int32(0))
    for _ in range(args.prefills):
        for name, run in whole.items():
            carry, spent = empty(plant, made[name], args.dtype), 0.0
            for start in starts:
                took, (carry, _) = timed(run, params, carry, tokens, jnp.int32(start))
                spent += took
            seconds[name].append(spent)
    prefill = _told(seconds)

    settings = {name: getattr(args, name) for name in ("tokens", "layers", "segment", "page_size", "dtype", "rounds")}
    settings |= {"prefills": args.prefills, "timed_segments": len(starts[EVERY - 1 :: EVERY])}
    results = [{"read": name, "attention": attention[name], "prefill": prefill[name]} for name in made]
    print(prompt_tables.prefill(results))
    write(args.output, "scripts/bench_prefill.py", settings, cases=results)


def _told(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median seconds of every case, and of its ratios to dense."""
    dense = np.asarray(seconds["dense"])
    return {
        name: {"seconds": float(np.median(each)), "over_dense": float(np.median(np.asarray(each) / dense))}
        for name, each in seconds.items()
    }


if __name__ == "__main__":
    main()
