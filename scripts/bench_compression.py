"""What a cache budget does to memory and to the time of a step as a text grows, on this device.

    python scripts/bench_compression.py

A model of SmolLM-135M's shape with random weights decodes two texts, compressed as `--cache-budget` has it. The pages
that they hold are counted after every token. At some lengths of the text the state is kept; then steps from each of
those, and from caches of as many tokens that forget nothing, are timed by turns. Told are medians of milliseconds,
their ratios to the shortest text's, round by round, and what a compression itself takes, shared out over the tokens
between two of them.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.control.compression import named
from et_jax.decode.decoder import Decoder, decoder, snapshot
from et_jax.decode.request import request
from et_jax.decode.state import DecodeState
from et_jax.evidence import prompt_tables
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, whole_context

TEXTS = 2  # decoded together; one row alone is another program to the compiler


def grown(d: Decoder, params: Params, lengths: list[int]) -> tuple[dict[int, DecodeState], int, list[float]]:
    """Return the states at these lengths of the text, the most pages held once it was compressed, and the seconds.

    Those are of each compression of all texts.
    """
    config, how, layout = d.config, d.config.compression, d.config.layout
    assert how is not None and layout is not None
    room = layout.region * config.page_size
    state = d.empty()
    for slot in range(TEXTS):
        asked = request(config, [5 + slot], limit=config.max_length - 1, seed=slot, temperature=1.0)
        state = d.insert(state, slot, asked)
    kept: dict[int, DecodeState] = {}
    length, shift, most, seconds = 0, 0, 0, []
    while length < max(lengths):
        point = how.point(1, shift, room)
        if length == point:
            began = time.perf_counter()
            for slot in range(TEXTS):
                state, granted = d.compress(state, slot)
                if not granted:
                    raise RuntimeError(f"no pages to compress a text of {length} tokens into")
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)
            shift, point = length - room, how.point(1, length - room, room)
        ahead = min(x for x in (point, *lengths) if x is not None and x > length)
        state, output, ran = d.decode((params,), state, min(ahead - length, config.max_steps))
        if output.refused.any():
            raise RuntimeError(f"no pages for a text of {length} tokens")
        length += int(ran)
        if shift:
            most = max(most, config.num_pages - 1 - int(state.table.num_free))
        if length in lengths:
            kept[length] = snapshot(state)
    return kept, most, seconds


def timed(d: Decoder, params: Params, state: DecodeState, steps: int) -> float:
    """Return the milliseconds of a step, of so many."""
    start = jax.block_until_ready(snapshot(state))
    began = time.perf_counter()
    jax.block_until_ready(d.decode((params,), start, steps))
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = arguments.parser(__doc__, results="compression_cost.json")
    parser.add_argument("--budget", type=arguments.count(), default=1024)
    parser.add_argument("--lengths", type=arguments.count(), nargs="+", default=[2048, 4096, 8192, 16_384, 20_000])
    parser.add_argument("--layers", type=arguments.count(), default=SMOLLM_135M.num_layers)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="runs of every line (default 9)")
    parser.add_argument("--steps", type=arguments.count(), default=8, help="steps of a run (default 8)")
    args = parser.parse_args()
    lengths = sorted(args.lengths)
    model = dataclasses.replace(
        SMOLLM_135M, num_layers=args.layers, windows=(None,) * args.layers, max_positions=max(lengths) + 64
    )
    params = initialise(model, jax.random.key(0), jnp.dtype(args.dtype))
    plain = whole_context(model, TEXTS, args.dtype, max_steps=32)
    how = named("latent", args.budget, every=args.budget // 4)
    pages = TEXTS * -(-(args.budget + how.every + plain.page_size) // plain.page_size) + 1
    whole, less = decoder(plain), decoder(replace(plain, compression=how, num_pages=pages))

    kept, most, seconds = grown(less, params, lengths)
    sides = {("held to the budget", length): (less, kept[length]) for length in lengths}
    full = jax.jit(lambda context: filled(plain, context, 1.0))
    milliseconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.rounds + 1):
        for name, (d, state) in sides.items():
            took = timed(d, params, state, args.steps)
            milliseconds.setdefault(name, []).append(took) if turn else None  # the first compiles
        for length in lengths:
            took = timed(whole, params, full(length), args.steps)
            milliseconds.setdefault(("whole", length), []).append(took) if turn else None
    cases: list[dict[str, Any]] = []
    for (cache, length), each in milliseconds.items():
        shortest = np.asarray(milliseconds[cache, lengths[0]])
        held = most if cache != "whole" else TEXTS * -(-length // plain.page_size)
        over = float(np.median(np.asarray(each) / shortest))
        cases.append({"cache": cache, "tokens": length, "pages": held, "ms": float(np.median(each)), "over": over})
    settings = {name: getattr(args, name) for name in ("budget", "layers", "dtype", "rounds", "steps")}
    settings |= {"texts": TEXTS, "page_size": plain.page_size, "compressions": len(seconds)}
    settings |= {"compression_ms_per_token": 1e3 * float(np.median(seconds[1:])) / how.every}
    print(prompt_tables.compression_cost(cases))
    write(args.output, "scripts/bench_compression.py", settings, cases=cases)


if __name__ == "__main__":
    main()
