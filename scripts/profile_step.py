"""Where the time of one decode step goes, by taking parts away.

Every line runs as a loop on the device, as `decode` does, so that the host is not measured. From top to bottom each
holds what the one above it holds and one thing more:

    weight products      every weight matrix times as many rows, nothing else: what a step cannot go below
    forward              the transformer, attention left out: norms, rotary positions, residuals
    + cache write        keys and values into their pages, and the summaries of those pages
    + attention          choosing the blocks, reading them, noting which
    step                 signals, sampling, laws, page table: everything

Lines are timed in turns and the least of each is shown. On a busy machine a difference may still come out negative;
there, `taskset -c 0 python scripts/profile_step.py --cpu-time` counts what one core did, whatever else it ran.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from et_jax.decode import cache as kv
from et_jax.decode.cache import KVCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.rows import Rows
from et_jax.decode.state import DecodeState
from et_jax.decode.step import extend_rows, step
from et_jax.errors import UsageError
from et_jax.models.checkpoint import read_config
from et_jax.models.hub import resolve
from et_jax.models.params import Params
from et_jax.models.transformer import Attend, forward, initialise
from et_jax.models.weights import Weight, nodes
from et_jax.softmax import Softmax
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, whole_context


def without_attention(write: bool, table: Array, length: Array, run: Array) -> Attend:
    """Return an `attend` that reads nothing and may write; keys and values flow on, lest XLA drop their products."""

    def attend(layer: int, q: Array, k: Array, v: Array, memory: KVCache, softmax: Softmax) -> tuple[Array, KVCache]:
        if write:
            cached = kv.write(memory.layers[layer], k, v, table, length, run.astype(jnp.int32))
            memory = kv.with_place(memory, layer, cached)
        return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), memory

    return attend


def advance(kind: str, config: DecoderConfig, params: Params, state: DecodeState) -> DecodeState:
    """Return the state after one step of a kind; what would be dead code there is kept alive."""
    if kind == "step":
        return step(config, (params,), state)[0]
    if kind == "weight products":
        return replace(state, token=products(params, state.token))
    length, run = state.length, state.active
    if kind == "+ attention":
        rows = Rows(slot=None, token=state.token, position=length, run=run)
        after, logits, stats = extend_rows(config, (params,), state, rows, length + 1)
        after = replace(after, control=replace(after.control, block_mask=stats.block_masks))
        return replace(after, token=some_token(logits), length=length + 1)
    own, asked = state.plants[0], (state.token[:, None], length[:, None])
    attend = without_attention(kind == "+ cache write", state.table.pages, length, run)
    logits, cache = forward(params, config.model, *asked, attend, own.cache)
    after = state.with_plant(0, replace(own, cache=cache))
    return replace(after, token=some_token(logits[:, 0]), length=length + 1)


def products(params: Params, token: Array) -> Array:
    """Return tokens that need the product of every weight matrix with rows of a token's embedding."""
    x = params.embedding.rows(token)
    matrices = [node for node in nodes(params.layers) if isinstance(node, Weight)]
    head = params.embedding if params.head is None else params.head
    y = x
    for matrix in [*matrices, head]:
        rows = jnp.tile(x, (1, -(-matrix.shape[1] // x.shape[1])))[:, : matrix.shape[1]]
        y = matrix.matmul(rows)
        x = x + (1e-6 * y[:, :1]).astype(x.dtype)  # the next product waits for this one, as in the model
    return some_token(y)


def some_token(logits: Array) -> Array:
    """Return a token that needs every logit and costs next to nothing."""
    return (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)


KINDS = ("weight products", "forward", "+ cache write", "+ attention", "step")


def loop(kind: str, config: DecoderConfig) -> Callable[[Params, DecodeState, Any], DecodeState]:
    """Return the jitted loop over steps of a kind; the state is donated."""

    def run(params: Params, state: DecodeState, num_steps: Array) -> DecodeState:
        return jax.lax.fori_loop(0, num_steps, lambda _, state: advance(kind, config, params, state), state)

    return jax.jit(run, donate_argnums=1)


def measure(config: DecoderConfig, args: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Return the milliseconds of one step of every kind: the least over rounds in which the kinds take turns."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    params = initialise(config.model, jax.random.key(0), dtype)
    start = jax.jit(partial(filled, config, args.context, args.temperature))
    loops = {kind: loop(kind, config) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(args.rounds + 1):
        for kind, run in loops.items():
            state = jax.block_until_ready(start())
            began = clock()
            jax.block_until_ready(run(params, state, jnp.int32(args.steps)))
            if turn:  # the first compiles
                times[kind].append(1e3 * (clock() - began) / args.steps)
    return {kind: min(each) for kind, each in times.items()}


def main() -> None:
    """Measure every batch and dtype and print a table."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--batch", type=arguments.count(), nargs="+", default=[2, 16], help="rows of a step (default 2 16)"
    )
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument(
        "--context", type=arguments.count(), default=64, help="tokens in every sequence at the start (default 64)"
    )
    parser.add_argument("--steps", type=arguments.count(), default=16, help="steps of a run (default 16)")
    parser.add_argument("--rounds", type=arguments.count(), default=7, help="runs of every line (default 7)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--layers", type=arguments.count(), default=30, help="layers of SmolLM-135M (default 30, all of them)"
    )
    shape.add_argument("--model", help="take another model's shape: bundled, bundled-small, a folder, or a hub name")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling (default 0, greedy)")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not time that passes")
    args = parser.parse_args()
    if min(args.batch) < 2:
        parser.error("--batch: a step has at least two rows")
    model = dataclasses.replace(SMOLLM_135M, num_layers=args.layers, windows=(None,) * args.layers)
    if args.model is not None:
        try:
            model = read_config(resolve(args.model))
        except UsageError as error:
            parser.error(str(error))
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {model.num_layers} layers, {args.context} tokens held"
    )
    for dtype in args.dtype:
        for batch in args.batch:
            config = whole_context(model, batch, dtype, max_steps=args.steps)
            figures = measure(config, args, dtype)
            print(f"\n{dtype}, {batch} rows: milliseconds a step, and more than the line above")
            before = 0.0
            for kind, milliseconds in figures.items():
                print(f"  {kind:16} {milliseconds:8.2f} {milliseconds - before:+8.2f}", flush=True)
                before = milliseconds


if __name__ == "__main__":
    main()
