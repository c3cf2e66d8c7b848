"""A cache in 8 bits against bfloat16: its bytes, what a step takes over long texts, and what a model still knows.

    python scripts/bench_cache.py --text HELD_OUT [--decode 2048 8192 16384] [--prefill 512]

Speed is that of random weights in the shape of SmolLM-135M: whole decode steps of a few rows that hold so many tokens
each, many steps in one call, and chunks of a prompt. The kinds take turns in one process, and ratios are taken turn by
turn. Quality is the bundled model's: perplexity on text that it was not trained on, read chunk by chunk through the
cache, with the difference of the losses row by row, and right answers to the tasks, the same questions to all. How far
what is stored is off is told of the keys and values of that text: with scales in float32, as they are, in bfloat16, and
with one scale for a page of tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.decode import cache as kv
from et_jax.decode import eight_bits
from et_jax.decode.chunk import Chunk
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.decode.extend import extend
from et_jax.decode.plant import PlantState
from et_jax.decode.prefill import prefill
from et_jax.decode.readers import Whole
from et_jax.decode.state import DecodeState, empty
from et_jax.evidence import serving_tables
from et_jax.models.transformer import initialise
from et_jax.serve.engine import Model, load
from et_jax.tasks.asking import evaluate_each
from et_jax.tasks.generators import TASKS
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring import text as held_out
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, whole_context

KINDS = ("bfloat16", *eight_bits.NAMED_8_BITS)
STEPS = 16  # in one call of `decode`


def configured(kind: str, rows: int, length: int, **settings: Any) -> DecoderConfig:
    """Return a decoder of the shape with a cache of a kind, each of its rows as long as that."""
    model = replace(SMOLLM_135M, max_positions=length)
    return replace(
        whole_context(model, rows, "bfloat16", **settings), cache_dtype=eight_bits.dtype_named(kind), dtype="bfloat16"
    )


def decoding(weights: Any, rows: int, context: int) -> Callable[[str], Callable[[], float]]:
    """Return what makes of a kind a function that decodes, and returns the tokens a second."""

    def made(kind: str) -> Callable[[], float]:
        config = configured(kind, rows, context + 2 * STEPS, max_steps=STEPS)
        steps = jax.jit(partial(decode, config), donate_argnums=1)
        begin = jax.jit(partial(filled, config, context, 1.0))

        def run() -> float:
            state = jax.block_until_ready(begin())
            began = time.perf_counter()
            _, _, ran = jax.block_until_ready(steps((weights,), state, jnp.int32(STEPS)))
            return rows * int(ran) / (time.perf_counter() - began)

        return run

    return made


def reading(weights: Any, tokens: int) -> Callable[[str], Callable[[], float]]:
    """Return what makes of a kind a function that reads a prompt in one call, and returns the tokens a second."""

    def made(kind: str) -> Callable[[], float]:
        config = replace(configured(kind, 2, SMOLLM_135M.max_positions, max_steps=1), prefill_batch=tokens)
        begin, read = jax.jit(partial(empty, config)), jax.jit(partial(prefill, config), donate_argnums=1)
        count = tokens // config.chunk
        rows = jnp.zeros(count, jnp.int32)
        prompt = jnp.arange(tokens, dtype=jnp.int32).reshape(count, config.chunk)

        def run() -> float:
            state: DecodeState = jax.block_until_ready(begin())
            began = time.perf_counter()
            jax.block_until_ready(read((weights,), state, rows, prompt, rows + config.chunk, rows < 0))
            return tokens / (time.perf_counter() - began)

        return run

    return made


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens a second of every kind, and of every turn how many times bfloat16's each one's are."""
    weights = initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16)
    cases = [("decode", context, decoding(weights, args.decode_rows, context)) for context in args.decode]
    cases += [("prefill", tokens, reading(weights, tokens)) for tokens in args.prefill]
    found = []
    for what, size, made in cases:
        runs = {kind: made(kind) for kind in KINDS}
        turns = [{kind: run() for kind, run in runs.items()} for _ in range(args.rounds + 1)][1:]  # the first compiles
        ratios = {kind: [turn[kind] / turn["bfloat16"] for turn in turns] for kind in KINDS}
        medians = {kind: statistics.median(turn[kind] for turn in turns) for kind in KINDS}
        found.append({"what": what, "size": size, "tokens_per_second": medians, "ratios": ratios})
        print(what, size, medians, {kind: statistics.median(ratio) for kind, ratio in ratios.items()}, flush=True)
        jax.clear_caches()
    return found


def read_through(model: Model, rows: np.ndarray) -> Iterator[tuple[Float[Array, "t v"], PlantState]]:
    """Read every row of tokens chunk by chunk through the model's cache; its logits, and the state after it."""
    length = rows.shape[1]
    plain = replace(model.decoder_config, num_slots=2, batch=2, max_length=length)
    config = replace(plain, num_pages=1 + plain.blocks_per_slot)
    plant, chunk = config.plants[0], config.chunk
    table = jnp.arange(1, 1 + config.blocks_per_slot, dtype=jnp.int32)[None]

    @jax.jit
    def read(tokens: Array) -> tuple[Array, PlantState]:
        def one(state: PlantState, part: tuple[Array, Array]) -> tuple[PlantState, Array]:
            token, start = part
            count = jnp.minimum(length - start, chunk)
            whole = Chunk(
                slot=jnp.zeros(1, jnp.int32),
                table=table,
                token=token[None],
                position=start[None],
                start=start[None],
                count=count[None],
                end=(start + count)[None],
            )
            logits, state, _, _ = extend(plant, model.params, state, whole, Whole())
            return state, logits[0]

        parts = jnp.pad(tokens, (0, -length % chunk)).reshape(-1, chunk)
        starts = chunk * jnp.arange(len(parts), dtype=jnp.int32)
        state, logits = jax.lax.scan(one, empty(config).plants[0], (parts, starts))
        return logits.reshape(-1, logits.shape[-1])[:length], state

    yield from map(read, jnp.asarray(rows))


def losses(model: Model, rows: np.ndarray) -> np.ndarray:
    """Return the mean loss of the second half of every row, nats a token."""
    half = rows.shape[1] // 2
    means = []
    for row, (logits, _) in zip(rows, read_through(model, rows), strict=True):
        told = jax.nn.log_softmax(logits[half:-1])
        means.append(-float(jnp.mean(jnp.take_along_axis(told, jnp.asarray(row[half + 1 :])[:, None], axis=1))))
    return np.asarray(means)


def rounding(model: Model, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return how far keys and values in 8 bits are off, as shares of their root mean squares, by their scales."""
    d = model.config.head_dim
    _, state = next(read_through(model, rows[:1]))
    pages = jnp.stack(
        [layer.pages[:, 1 : 1 + rows.shape[1] // model.decoder_config.page_size] for layer in state.cache.layers]
    )
    found = []
    for kind, dtype in eight_bits.NAMED_8_BITS.items():
        for scales in ("float32", "bfloat16", "a page"):
            line: dict[str, Any] = {"kind": kind, "scales": scales}
            for name, x in (("keys", pages[..., :d]), ("values", pages[..., d : 2 * d])):
                x = x.astype(jnp.float32)
                off = jax.jit(partial(_stored, dtype=dtype, scales=scales))(x) - x
                line[name] = float(jnp.sqrt(jnp.mean(off**2) / jnp.mean(x**2)))
            found.append(line)
    return found


def _stored(x: Float[Array, "*b s d"], dtype: Any, scales: str) -> Float[Array, "*b s d"]:
    """What is read of keys or values, under scales of tokens in a dtype, or of pages."""
    if scales == "a page":
        numbers, scale = eight_bits.quantized(x.reshape(*x.shape[:-2], -1), dtype)
        return (numbers.astype(jnp.float32) * scale[..., None]).reshape(x.shape)
    numbers, scale = eight_bits.quantized(x, dtype)
    if scales == "float32":
        return numbers.astype(jnp.float32) * scale[..., None]
    scale, largest = jax.lax.reduce_precision(scale, 8, 7)[..., None], eight_bits.LARGEST[dtype]
    numbers = jnp.clip(x / jnp.where(scale > 0, scale, 1.0), -largest, largest)
    numbers = jnp.round(numbers) if dtype == jnp.int8 else numbers
    return numbers.astype(dtype).astype(jnp.float32) * scale


def quality(args: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, perplexity and right answers of every kind, and what tells them apart."""
    models = {kind: load(args.model, dtype="bfloat16", cache_dtype=kind, num_pages=args.num_pages) for kind in KINDS}
    plain = models["bfloat16"]
    rows = held_out.rows(plain, args.text, args.rows, args.length + 1)
    nats = {kind: losses(model, rows) for kind, model in models.items()}
    tasks = args.task or TASKS
    answers = evaluate_each(models, tasks, args.task_length, depths=DEPTHS, samples=args.samples)
    right = {kind: {task: [one.right for one in answers[kind][task]] for task in tasks} for kind in models}
    heads = plain.config.num_layers * plain.config.num_kv_heads
    found = []
    for kind, model in models.items():
        more = nats[kind] - nats["bfloat16"]
        low, high = paired.interval(more)
        found.append(
            {
                "kind": kind,
                "token_bytes": heads * kv.token_bytes(plain.config.head_dim, model.decoder_config.cache_dtype),
                "perplexity": float(np.exp(nats[kind].mean())),
                "nats_more": {"mean": float(more.mean()), "low": low, "high": high},
                "right": {task: sum(answers) for task, answers in right[kind].items()},
                "p": {task: paired.p_of_losses(right["bfloat16"][task], right[kind][task]) for task in tasks},
            }
        )
    return {
        "kinds": found,
        "questions": {task: len(answers) for task, answers in right["bfloat16"].items()},
        "rounding": rounding(models["bfloat16"], rows),
    }


def main() -> None:
    """Parse the arguments, measure, print the tables and write the figures."""
    parser = arguments.parser(__doc__, "model", "text", "rows", "samples", results="cache.json")
    size = arguments.count()
    contexts = [2048, 8192, 16384]
    parser.add_argument(
        "--decode", type=size, nargs="+", default=contexts, help="tokens held (default 2048 8192 16384)"
    )
    parser.add_argument("--decode-rows", type=size, default=2, help="rows of a step (default 2)")
    parser.add_argument("--prefill", type=size, nargs="+", default=[512], help="tokens of a call (default 512)")
    parser.add_argument("--rounds", type=size, default=5, help="turns of every line (default 5)")
    arguments.add_quality(parser)
    args = parser.parse_args()
    with arguments.refusals("bench_cache"):
        known, timed = quality(args), speed(args)
    print(serving_tables.cached(known, timed))
    names = ("model", "rows", "length", "task_length", "samples", "decode_rows", "rounds")
    settings = {name: getattr(args, name) for name in names} | {"text": args.text.name}
    write(args.output, "scripts/bench_cache.py", settings, quality=known, speed=timed)


if __name__ == "__main__":
    main()
