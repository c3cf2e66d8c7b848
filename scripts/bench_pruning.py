"""What a step takes under each way of pruning by E_b > theta, over one that reads everything, on real text.

    python scripts/bench_pruning.py TEXT [--length 480 --length 1900]

As many rows as `--rows` are prefilled with as many tokens of TEXT, each from a place of its own, and decode `--steps`
tokens on the device, greedily, after one that looks at everything. The ways take turns for `--rounds` rounds; shown are
the median of each in milliseconds a step, the median of its ratio to `off` in the same round, and the share of blocks
and of bytes that it read. Nothing is asserted.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure_pruning import ALPHAS, pruned

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode.decoder import snapshot
from et_jax.decode.plant import costs
from et_jax.decode.request import request
from et_jax.evidence import tables
from et_jax.serve.chunks import calls
from et_jax.serve.engine import Model, load
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.text import rows as rows_of

CONTROLS: dict[str, Controller] = {
    "off": preset("off"),
    **{f"paper, {by}": pruned("paper", alpha) for by, alpha in ALPHAS.items()},
    **{name: preset(name) for name in ("guarded", "certified", "adaptive")},
}


def started(
    model: Model,
    control: Controller,
    texts: np.ndarray,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Callable[[], float], dict]:
    """Return what times `steps` steps of every text and answers the milliseconds of one, and the shares it reads."""
    d = model.decoder(control)
    state = d.empty()
    for slot, text in enumerate(texts.tolist()):
        for chunk in calls(d.config, slot, text[:-1]):
            state, _ = d.prefill(model.weights, state, *chunk)
        state = d.insert(state, slot, request(d.config, text, limit=2 * steps + 2, temperature=0.0))
    state, _, _ = d.decode(model.weights, state, 1)

    def timed() -> float:
        own = jax.block_until_ready(snapshot(state))
        begun = clock()
        jax.block_until_ready(d.decode(model.weights, own, steps))
        return 1e3 * (clock() - begun) / steps

    _, output, _ = d.decode(model.weights, snapshot(state), steps)
    signals = jax.device_get(output.signals)
    read, looked = (getattr(signals, name)[:steps].sum() for name in ("blocks_read", "summaries_read"))
    held = signals.pages_held[:steps].sum() * model.config.num_layers * model.config.num_kv_heads
    [moved] = costs(d.config.plants, model.weights, state.plants, d.config.by_mass_of)
    share = (read * moved.block + looked * moved.summary) / (held * moved.block)
    return timed, {"share_read": float(read / held), "share_bytes": float(share)}


def measure(model: Model, texts: np.ndarray, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds, ratios and shares of every way."""
    ways = {name: started(model, control, texts, steps) for name, control in CONTROLS.items()}
    taken = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (timed, _) in ways.items():
            taken[name].append(timed())
    found = []
    for name, (_, shares) in ways.items():
        ratios = np.divide(taken[name][1:], taken["off"][1:])  # the first round compiles
        found.append(
            {"control": name, "milliseconds": float(np.median(taken[name][1:])), "over_off": float(np.median(ratios))}
            | shares
        )
        print(texts.shape, *found[-1].values(), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = arguments.parser(__doc__, "model", results="pruning_cost.json")
    parser.add_argument("text", type=Path)
    parser.add_argument("--length", action="append", type=arguments.count(), help="repeatable (default 480, 1900)")
    parser.add_argument("--rows", type=arguments.count(2), default=2)
    parser.add_argument("--steps", type=arguments.count(), default=32)
    parser.add_argument("--rounds", type=arguments.count(), default=11)
    args = parser.parse_args()
    cases = []
    with arguments.refusals("bench_pruning"):
        model = load(args.model, max_num_seqs=args.rows)
        for length in args.length or [480, 1900]:
            texts = rows_of(model, args.text, args.rows, length)
            cases.append({"length": length, "rows": measure(model, texts, args.steps, args.rounds)})
    print(tables.pruning_cost(cases))
    settings = {"model": args.model, "sequences": args.rows, "steps": args.steps, "rounds": args.rounds}
    write(args.output, "scripts/bench_pruning.py", settings, cases=cases)


if __name__ == "__main__":
    main()
