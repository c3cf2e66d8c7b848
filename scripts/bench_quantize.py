"""Weights in 8 bits against bfloat16: what a step and a chunk of prefill take, and what a model still knows.

    python scripts/bench_quantize.py --text HELD_OUT [--decode 2 4 16] [--prefill 512]

Speed is that of random weights in the shape of SmolLM-135M: whole decode steps, many in one call, by the rows of a
step, and chunks of a prompt of so many tokens. Both kinds take turns in one process, and ratios are taken turn by turn.
Quality is the bundled model's: perplexity on text that it was not trained on, with the difference of the losses row by
row, and right answers to the tasks, the same questions to both.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.decoder import decode
from et_jax.decode.prefill import prefill
from et_jax.decode.state import empty
from et_jax.evidence import serving_tables
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.models.weights import num_bytes, quantized
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

KINDS = {"bfloat16": None, "int8": "int8"}
STEPS = 16  # in one call of `decode`


def decoding(rows: int, context: int) -> Callable[[Params], Callable[[], float]]:
    """Return what makes of weights a function that decodes, and returns the tokens a second."""
    config = whole_context(SMOLLM_135M, rows, "bfloat16", max_steps=STEPS)
    begin, steps = jax.jit(partial(filled, config, context, 1.0)), jax.jit(partial(decode, config), donate_argnums=1)

    def run(params: Params) -> float:
        state = jax.block_until_ready(begin())
        began = time.perf_counter()
        _, _, ran = jax.block_until_ready(steps((params,), state, jnp.int32(STEPS)))
        return rows * int(ran) / (time.perf_counter() - began)

    return lambda params: partial(run, params)


def reading(tokens: int) -> Callable[[Params], Callable[[], float]]:
    """Return what makes of weights a function that reads a prompt in one call, and returns the tokens a second."""
    plain = whole_context(SMOLLM_135M, 2, "bfloat16", max_steps=1)
    config = replace(plain, prefill_batch=tokens)
    begin, read = jax.jit(partial(empty, config)), jax.jit(partial(prefill, config), donate_argnums=1)
    count = tokens // config.chunk
    rows = jnp.zeros(count, jnp.int32)
    prompt = jnp.arange(tokens, dtype=jnp.int32).reshape(count, config.chunk)

    def run(params: Params) -> float:
        state = jax.block_until_ready(begin())
        began = time.perf_counter()
        jax.block_until_ready(read((params,), state, rows, prompt, rows + config.chunk, rows < 0))
        return tokens / (time.perf_counter() - began)

    return lambda params: partial(run, params)


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens a second of both kinds, and of every turn how many times bfloat16's int8's are."""
    plain = initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16)
    weights = {"bfloat16": plain, "int8": quantized(plain, jnp.bfloat16)}
    cases = [("decode", rows, decoding(rows, args.context)) for rows in args.decode]
    cases += [("prefill", tokens, reading(tokens)) for tokens in args.prefill]
    found = []
    for what, size, made in cases:
        runs = {kind: made(params) for kind, params in weights.items()}
        turns = [{kind: run() for kind, run in runs.items()} for _ in range(args.rounds + 1)][1:]  # the first compiles
        ratios = [turn["int8"] / turn["bfloat16"] for turn in turns]
        medians = {kind: statistics.median(turn[kind] for turn in turns) for kind in weights}
        line = {"what": what, "size": size, "tokens_per_second": medians, "ratios": ratios}
        found.append(line | {"ratio": statistics.median(ratios)})
        print(what, size, medians, found[-1]["ratio"], flush=True)
    return found


def losses(model: Model, rows: np.ndarray) -> np.ndarray:
    """Return the mean loss of the second half of every row, nats a token."""
    logits, targets = held_out.held_out_logits(model, rows)
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)
    return np.asarray(each, np.float64).reshape(len(rows), -1).mean(axis=1)


def quality(args: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, perplexity and right answers of both kinds, and what tells them apart."""
    models = {
        kind: load(args.model, dtype="bfloat16", quantize=quantize, num_pages=args.num_pages)
        for kind, quantize in KINDS.items()
    }
    rows = held_out.rows(models["bfloat16"], args.text, args.rows, args.length + 1)
    nats = {kind: losses(model, rows) for kind, model in models.items()}
    tasks = args.task or TASKS
    answers = evaluate_each(models, tasks, args.task_length, depths=DEPTHS, samples=args.samples)
    right = {kind: {task: [one.right for one in answers[kind][task]] for task in tasks} for kind in models}
    low, high = paired.interval(nats["int8"] - nats["bfloat16"])
    return {
        "kinds": [
            {
                "kind": kind,
                "bytes": num_bytes(model.params),
                "perplexity": float(np.exp(nats[kind].mean())),
                "right": {task: sum(answers) for task, answers in right[kind].items()},
            }
            for kind, model in models.items()
        ],
        "questions": {task: len(answers) for task, answers in right["bfloat16"].items()},
        "nats_more": {"mean": float((nats["int8"] - nats["bfloat16"]).mean()), "low": low, "high": high},
        "p": {task: paired.p_of_losses(right["bfloat16"][task], right["int8"][task]) for task in tasks},
    }


def main() -> None:
    """Parse the arguments, measure, print the tables and write the figures."""
    parser = arguments.parser(__doc__, "model", "text", "rows", "samples", results="quantize.json")
    size = arguments.count()
    parser.add_argument("--decode", type=size, nargs="+", default=[2, 4, 16], help="rows of a step (default 2 4 16)")
    parser.add_argument("--prefill", type=size, nargs="+", default=[512], help="tokens of a call (default 512)")
    parser.add_argument("--context", type=size, default=64, help="tokens held at the start (default 64)")
    parser.add_argument("--rounds", type=size, default=9, help="turns of every line (default 9)")
    arguments.add_quality(parser)
    args = parser.parse_args()
    with arguments.refusals("bench_quantize"):
        known, timed = quality(args), speed(args)
    print(serving_tables.quantized(known, timed))
    names = ("model", "rows", "length", "task_length", "samples", "context", "rounds")
    settings = {name: getattr(args, name) for name in names} | {"text": args.text.name}
    write(args.output, "scripts/bench_quantize.py", settings, quality=known, speed=timed)


if __name__ == "__main__":
    main()
