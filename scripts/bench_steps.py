"""What a step takes under every preset, over one that reads everything, at lengths from 128 to 16k tokens.

    python scripts/bench_steps.py TEXT [--only bundled --length 480 --rows 1] [--only shape --length 8192 --rows 2]

Of the bundled model as many rows as `--rows` are prefilled with TEXT, each from a place of its own. Of the shape of
SmolLM-135M, with random weights, caches are filled with random tokens, a few of whose keys in a hundred stand out, so
that presets read few blocks at length. Both decode `--steps` tokens on the device, greedily, after one that
looks at everything. Presets score at every length (`min_context` 0) and take turns for `--rounds` rounds; shown are the
median of each in milliseconds a step, the median of its ratio to `off` in the same round, the share of blocks that it
read, and the length from which on it is no slower than `off`. Cases that the output file holds of other models, lengths
and rows are kept, so that it can be measured in pieces. On a busy machine `--cpu-time` counts what the processor did
for it on all its cores, not the time that passed. Nothing is asserted.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_pruning import started
from jaxtyping import Array

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.priority import EntropyDrift
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.decode import cache as kv
from et_jax.decode.cache import KVCache, LayerCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.decode.plant import PlantState
from et_jax.decode.state import DecodeState
from et_jax.evidence import tables
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise
from et_jax.serve.engine import load
from et_jax.types import Table, replace
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, whole_context
from scripts.measuring.text import rows as rows_of

CONTROLS: dict[str, Controller] = {
    "off": preset("off"),
    **{name: preset(name, min_context=0) for name in ("paper", "guarded", "certified", "adaptive")},
}
LENGTHS = {"bundled": (128, 480, 1900), "shape": (128, 512, 2048, 8192, 16384)}
ROWS = {"bundled": (1, 16), "shape": (2, 16)}
CAPACITIES = (2304, 16640)  # tokens that fit a slot of the shape: the least of these that hold the length
# of the shape: of 2,048 tokens 6 to 9% is read
TOLERANCES = {"paper": 0.05, "guarded": 0.05, "certified": 0.9, "adaptive": 0.1}
OUTSTANDING = 1 / 256  # of the random keys stand out, and are so many times as long
LONGER = 24.0
PIECE = 256  # tokens written in a call
Timed = tuple[Callable[[], float], dict[str, float]]


class Shape:
    """Decoders of a shape whose states share one cache of random tokens, so that the largest of them fits twice."""

    def __init__(
        self,
        model: ModelConfig,
        rows: int,
        capacity: int,
        length: int,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Draw weights, and a cache in which `rows` slots hold `capacity` tokens; they decode from `length` on."""
        self.clock = clock
        model = dataclasses.replace(model, max_positions=capacity)
        heads = np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32)
        self.config = whole_context(
            model, rows, "bfloat16", max_steps=steps, calibration=Calibration(sensitivity=Table(heads))
        )
        self.length = length
        self.params = initialise(model, jax.random.key(0), jnp.bfloat16)
        self.cache = stored(self.config)

    def started(self, control: Controller, steps: int) -> Timed:
        """Return what times `steps` steps of every slot and answers the milliseconds of one, and the share it reads."""
        config = dataclasses.replace(self.config, controller=at_tolerance(control))
        small = jax.jit(lambda: replace(filled(config, self.length, 0.0), plants=()))()
        num_cached = jnp.full(config.num_slots, self.length, jnp.int32)
        run = jax.jit(partial(decode, config), donate_argnums=1)

        def run_from(state: DecodeState, num_steps: int) -> tuple[DecodeState, Any, float]:
            own = replace(jax.block_until_ready(state), plants=(self._lent(config, num_cached),))
            begun = self.clock()
            own, output, _ = jax.block_until_ready(run((self.params,), own, jnp.int32(num_steps)))
            took = 1e3 * (self.clock() - begun) / num_steps
            self._take_back(own.plants[0].cache)
            return replace(own, plants=()), output, took

        small, _, _ = run_from(small, 1)
        num_cached = small.length
        copy = jax.jit(partial(jax.tree.map, jnp.copy))
        _, output, _ = run_from(copy(small), steps)
        read, held = (float(jnp.sum(getattr(output.signals, name)[:steps])) for name in ("blocks_read", "pages_held"))
        share = read / (held * config.model.num_layers * config.model.num_kv_heads)
        return lambda: run_from(copy(small), steps)[2], {"share_read": share}

    def _lent(self, config: DecoderConfig, num_cached: Array) -> PlantState:
        """The plant's state with the cache, what the configuration does not keep left aside."""
        keeps = config.keeps

        def layer(full: LayerCache) -> LayerCache:
            return LayerCache(
                pages=full.pages,
                summary=full.summary if "summaries" in keeps else None,
                key_codes=full.key_codes if "codes" in keeps else None,
            )

        layers = tuple(map(layer, self.cache.layers))
        return PlantState(cache=KVCache(layers=layers, surprisal=None), num_cached=jnp.copy(num_cached))

    def _take_back(self, cache: KVCache) -> None:
        both = zip(self.cache.layers, cache.layers, strict=True)
        layers = tuple(
            LayerCache(
                pages=new.pages,
                summary=old.summary if new.summary is None else new.summary,
                key_codes=old.key_codes if new.key_codes is None else new.key_codes,
            )
            for old, new in both
        )
        self.cache = KVCache(layers=layers, surprisal=None)


def at_tolerance(control: Controller) -> Controller:
    """Return a preset's controller with a tolerance that its law leaves alone: a random model is never certain."""
    if control.preset.name == "off":
        return control
    fixed = Constant(TOLERANCES[control.preset.name])
    return replace(control, law=chain(EmaEntropy(), FallClock(), fixed, EntropyDrift()))


def stored(config: DecoderConfig) -> KVCache:
    """Return a cache in which slots hold as many random tokens as fit, with all summaries, alike in all layers."""
    model, rows, size = config.model, config.num_slots, config.page_size
    k, d = model.num_kv_heads, model.head_dim
    cache = kv.empty(1, k, d, config.num_pages, size, config.cache_dtype, key_codes=True)
    table = jnp.arange(1, rows * config.blocks_per_slot + 1, dtype=jnp.int32).reshape(rows, -1)

    def piece(layer: LayerCache, key: Array, start: Array) -> LayerCache:
        keys, values, which = jax.random.split(key, 3)
        shape = rows, PIECE, k, d
        outstanding = jax.random.uniform(which, (*shape[:3], 1)) < OUTSTANDING
        drawn = jax.random.normal(keys, shape) * jnp.where(outstanding, LONGER, 1.0)
        count = jnp.full(rows, PIECE, jnp.int32)
        return kv.write(layer, drawn, jax.random.normal(values, shape), table, jnp.full(rows, start), count)

    write_piece = jax.jit(piece, donate_argnums=0)
    [layer] = cache.layers
    for index in range(config.max_length // PIECE):
        layer = write_piece(layer, jax.random.key(index), jnp.int32(index * PIECE))
    copy = jax.jit(partial(jax.tree.map, jnp.copy))
    return KVCache(layers=(layer, *(copy(layer) for _ in range(model.num_layers - 1))), surprisal=None)


def by_turns(ways: dict[str, Timed], rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds, ratios and shares of every way."""
    taken = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (timed, _) in ways.items():
            taken[name].append(timed())
    found = []
    for name, (_, shares) in ways.items():
        times, off = (np.asarray(taken[one][1:]) for one in (name, "off"))  # the first round compiles
        figures = {"milliseconds": float(np.median(times)), "over_off": float(np.median(times / off))}
        found.append({"control": name} | figures | {"share_read": shares["share_read"]})
    return found


def of_bundled(args: argparse.Namespace, rows: int, length: int) -> list[dict[str, Any]]:
    """Return what every preset takes on the bundled model."""
    model = load("bundled", max_num_seqs=rows)
    texts = rows_of(model, args.text, rows, length)
    ways = {name: started(model, control, texts, args.steps, args.clock) for name, control in args.controls}
    return by_turns(ways, args.rounds)


def of_shape(args: argparse.Namespace, rows: int, length: int) -> list[dict[str, Any]]:
    """Return what every preset takes in the shape of SmolLM-135M."""
    model = dataclasses.replace(SMOLLM_135M, num_layers=args.layers, windows=(None,) * args.layers)
    capacity = next(one for one in CAPACITIES if one > length + args.steps)
    shape = Shape(model, rows, capacity, length, args.steps, args.clock)
    return by_turns({name: shape.started(control, args.steps) for name, control in args.controls}, args.rounds)


def main() -> None:
    parser = arguments.parser(__doc__, results="steps.json")
    parser.add_argument("text", type=Path)
    parser.add_argument("--only", choices=LENGTHS, help="one of the models (default both)")
    parser.add_argument("--length", action="append", type=arguments.count(), help="repeatable (default all)")
    parser.add_argument("--rows", action="append", type=arguments.count(), help="repeatable (default all)")
    parser.add_argument("--control", action="append", choices=list(CONTROLS)[1:], help="repeatable (default all)")
    parser.add_argument("--layers", type=arguments.count(), default=30, help="of the shape (default 30, all of them)")
    parser.add_argument("--steps", type=arguments.count(), default=16)
    parser.add_argument("--rounds", type=arguments.count(), default=7)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not time that passes")
    args = parser.parse_args()
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    args.controls = [one for one in CONTROLS.items() if one[0] in ("off", *(args.control or CONTROLS))]
    measures = {"bundled": of_bundled, "shape": of_shape}
    cases = []
    with arguments.refusals("bench_steps"):
        for name, measure in measures.items():
            if args.only not in (None, name):
                continue
            for length in args.length or LENGTHS[name]:
                for rows in args.rows or ROWS[name]:
                    cases.append({"model": name, "rows": rows, "length": length, "ways": measure(args, rows, length)})
                    print(tables.steps(cases[-1:]), file=sys.stderr, flush=True)
    if args.output.exists():
        fresh = {key(case) for case in cases}
        kept = json.loads(args.output.read_text(encoding="utf-8"))["cases"]
        cases = sorted([*(case for case in kept if key(case) not in fresh), *cases], key=key)
    print(tables.steps(cases))
    settings = {"steps": args.steps, "rounds": args.rounds, "layers": args.layers}
    settings["clock"] = "of the processor" if args.cpu_time else "on the wall"
    write(args.output, "scripts/bench_steps.py", settings, cases=cases)


def key(case: dict[str, Any]) -> tuple[str, int, int]:
    """Return what a case is known by: the model, the rows, the length."""
    return case["model"], case["rows"], case["length"]


if __name__ == "__main__":
    main()
