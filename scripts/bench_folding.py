"""What rows of one sequence cost beside one row, reading its pages once and reading them once each, on this device.

    python scripts/bench_folding.py

Every line runs `extend`, the part of a step that holds the model, as a loop on the device. One sequence of two slots
runs, as with a batch of one: its newest token alone, then with drafted tokens behind it, their pages read once for all
(folded) and once for each row. The three take turns; told are the medians of their times and of each round's ratios.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from et_jax.decode.config import DecoderConfig
from et_jax.decode.draft import Drafts, laid_out
from et_jax.decode.rows import Rows
from et_jax.decode.state import DecodeState
from et_jax.decode.step import extend_rows
from et_jax.models.checkpoint import read_config
from et_jax.models.config import ModelConfig
from et_jax.models.hub import resolve
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.results import table, write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, whole_context

LAYERS = 4  # of SmolLM-135M at a long context
WAYS = ("one row", "folded", "a row each")


def cases() -> list[tuple[str, ModelConfig, int, int]]:
    """Return a name, a model, the tokens held and the rows of every case."""
    long = dataclasses.replace(
        SMOLLM_135M, num_layers=LAYERS, windows=(None,) * LAYERS, max_positions=16_384 + 64, vocab_size=1024
    )
    bundled = dataclasses.replace(read_config(resolve("bundled")), max_positions=2048)
    found = [("bundled", bundled, context, 9) for context in (300, 2000)]
    return [*found, (f"SmolLM-135M, {LAYERS} layers", long, 16_384, 5)]


def loop(way: str, config: DecoderConfig, most: int, params: Params, state: DecodeState, steps: int) -> Array:
    """Return a sum of logits of so many steps; each takes its token from those before."""
    rows = Rows(slot=None, token=state.token, position=state.length, run=jnp.asarray([True, False]))
    drafts = Drafts(token=jnp.ones((2, most), jnp.int32), count=jnp.asarray([most, 0], jnp.int32))
    whole, end, at = rows, rows.position + 1, None
    if way != "one row":
        whole, end, at = laid_out(rows, drafts, 2 + most)

    def step(_: Array, carry: tuple) -> tuple:
        plants, total = carry
        token = whole.token + (total > 1e30).astype(jnp.int32)  # the next step waits for this one
        shared = at if way == "folded" else None
        before = replace(state, plants=plants)
        after, logits, _stats = extend_rows(config, (params,), before, replace(whole, token=token), end, shared)
        return after.plants, total + jnp.max(logits)

    return jax.lax.fori_loop(0, steps, step, (state.plants, jnp.float32(0.0)))[1]


def measured(model: ModelConfig, dtype: str, context: int, rows: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of an `extend` every way, and the rounds' ratios to one row, as medians."""
    config = whole_context(model, 2, dtype, max_steps=1)
    params = initialise(model, jax.random.key(0), dtype)
    state = jax.jit(lambda: filled(config, context, 0.0))()
    run = {way: jax.jit(loop, static_argnums=(0, 1, 2, 5)) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, each in run.items():
            began = time.perf_counter()
            jax.block_until_ready(each(way, config, rows - 1, params, state, steps))
            if turn:  # the first compiles
                seconds[way].append((time.perf_counter() - began) / steps)
    one = np.asarray(seconds["one row"])
    over = {way: float(np.median(np.asarray(seconds[way]) / one)) for way in WAYS[1:]}
    return {"milliseconds": {way: 1e3 * statistics.median(each) for way, each in seconds.items()}, "over_one_row": over}


def main() -> None:
    """Measure every case in every dtype, print a table and write the figures."""
    parser = arguments.parser(__doc__, results="folding.json")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="runs of every line (default 9)")
    parser.add_argument("--steps", type=arguments.count(), default=8, help="steps of a run (default 8)")
    args = parser.parse_args()
    results, lines = [], []
    for name, model, context, rows in cases():
        for dtype in args.dtype:
            found = measured(model, dtype, context, rows, args.rounds, args.steps)
            results.append({"model": name, "dtype": dtype, "context": context, "rows": rows} | found)
            lines.append([name, dtype, context, rows, *found["milliseconds"].values(), *found["over_one_row"].values()])
    header = ["model", "dtype", "tokens", "rows", *(f"{way}, ms" for way in WAYS), "folded / one", "each / one"]
    print(table(header, lines))
    write(args.output, "scripts/bench_folding.py", {"rounds": args.rounds, "steps": args.steps}, cases=results)


if __name__ == "__main__":
    main()
