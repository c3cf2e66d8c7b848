"""How fine must the copies of keys be that blocks are chosen by? Answers against bytes, with coarser codes and fewer.

    python scripts/measure_codes.py

Codes of 8 bits are rounded to those of 4 or of 2 as they are written, which is exact: 255 is 15 times 17, and 3 times
85. "half" keeps 8 bits of every second frequency of the rotary embedding and of the other channels the block's mean
alone, which its summary has. Blocks are chosen by preset `adaptive` and by one constant threshold on E_b (preset
`paper` with alpha by codes). Bytes moved are those of the blocks read, the summaries and the codes, over those of all
keys and values. `p` is the chance of so many losses against gains, next to reading everything, by a fair coin.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from measure_pruning import controls as ways_of_pruning

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode import cache
from et_jax.evidence import tables
from et_jax.serve.engine import load
from et_jax.tasks.asking import counter, evaluate, grid
from et_jax.tasks.generators import TASKS
from scripts.measuring import arguments, paired
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write

TASKS_ASKED = ("passkey", "multi_needle", "tracing", "copying")  # those that pruning by mean keys loses
Encode = Callable[[jax.Array, jax.Array], jax.Array]


def coarser(step: int) -> Encode:
    """Return an encoding whose codes are every `step`-th of the 256."""
    written = cache.encode

    def encode(key: jax.Array, key_box: jax.Array) -> jax.Array:
        code = written(key, key_box).astype(jnp.float32) + 128.0
        return (step * jnp.round(code / step) - 128.0).astype(jnp.int8)

    return encode


def half() -> Encode:
    """Return an encoding that keeps every second frequency, and of the other channels the mean of the block's codes."""
    written = cache.encode

    def encode(key: jax.Array, key_box: jax.Array) -> jax.Array:
        code = written(key, key_box).astype(jnp.float32).reshape(key.shape)
        mean = jnp.mean(code, axis=-2, keepdims=True)
        kept = jnp.arange(key.shape[-1]) % 2 == 0  # the halves of a pair are d/2 apart, which is even
        code = jnp.where(kept, code, jnp.round(mean))
        return code.astype(jnp.int8).reshape(*key.shape[:-2], -1)

    return encode


CODES: dict[str, tuple[Callable[[], Encode], float]] = {
    "8 bits": (lambda: cache.encode, 1.0),
    "4 bits": (lambda: coarser(17), 0.5),
    "2 bits": (lambda: coarser(85), 0.25),
    "8 bits, half": (half, 0.5),
}
"""Encodings, and their bytes over those of 8 bits."""


def controls() -> dict[str, Controller]:
    """Return what chooses by codes, by name."""
    return {"adaptive": preset("adaptive"), "constant theta": ways_of_pruning()["constant, 8-bit keys"]}


def measure(codes: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return right answers and what was read and moved, by selector and task, with codes of one kind."""
    make, size = CODES[codes]
    lines = []
    jax.clear_caches()
    with mock.patch.object(cache, "encode", make()):
        model = load(args.model)
        codes_over_block = 1 / (
            2 * jnp.dtype(model.decoder_config.cache_dtype).itemsize
        )  # a byte a channel of the keys
        for name, control in controls().items():
            for task in args.task or TASKS_ASKED:
                asked = grid(counter(model), [task], [args.length], depths=DEPTHS, samples=args.samples, seed=args.seed)
                dense = [answer.right for answer in evaluate(model, asked, control="off")]
                answers = evaluate(model, asked, control=control)
                right = [answer.right for answer in answers]
                line = {
                    "codes": codes,
                    "selector": name,
                    "task": task,
                    "questions": len(asked),
                    "dense": sum(dense),
                    "right": sum(right),
                    "share_read": float(np.mean([answer.share_read for answer in answers])),
                    "share_bytes": float(np.mean([answer.share_bytes or 0.0 for answer in answers]))
                    - (1 - size) * codes_over_block,
                    "p": paired.p_of_losses(dense, right),
                }
                lines.append(line)
                print(*line.values(), file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = arguments.parser(__doc__, "model", "samples", "seed", results="codes.json")
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="repeatable (default: four)")
    parser.add_argument("--length", type=arguments.count(), default=2048)
    args = parser.parse_args()
    with arguments.refusals("measure_codes"):
        lines = [line for codes in CODES for line in measure(codes, args)]
    print(tables.codes(lines))
    settings = {name: getattr(args, name) for name in ("model", "length", "samples", "seed")}
    write(args.output, "scripts/measure_codes.py", settings, lines=lines)


if __name__ == "__main__":
    main()
