"""What the entropy estimator and the control laws cost, as a share of a decode step.

The step is that of `decode`, many in one call, on the shape of SmolLM-135M with random weights. Beside it, turn by
turn, run loops of

    estimator, raw        one pass over the logits: moments, entropy, varentropy
    estimator, tempered   the same at each row's own temperature; a step makes this second pass too, unless every
                          row's temperature is 0 or 1
    laws                  clock, damped thermostat with its counters, tolerance, drift, filter, for every row

in which every pass needs the one before it. Shares are taken turn by turn and their medians shown. Nothing is
asserted. For a large model that is not at hand, FLOPs and bytes of the estimator as XLA counts them stand beside those
of a token of a Llama-3-8B.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import clock, entropy, guards, priority, smoothing, temperature, tolerance
from et_jax.control.base import ControlState, Law, Signals, chain
from et_jax.control.controller import Controller
from et_jax.decode.decoder import decode
from et_jax.evidence import serving_tables
from et_jax.models.params import Params, num_multiplied
from et_jax.models.transformer import initialise
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import LLAMA_3_8B, SMOLLM_135M
from scripts.measuring.states import filled, whole_context

STEPS = 32  # in one call of `decode`
PARTS = ("estimator, raw", "estimator, tempered", "laws")


def laws() -> Law:
    """Return the chain whose cost is measured: one law of every kind."""
    thermostat = temperature.DampedThermostat(2.0)
    return chain(
        smoothing.EmaEntropy(),
        clock.FallClock(),
        guards.Stability(guards.Saturation(thermostat, "temperature", 0.1, 2.0), 1.0),
        guards.Floored(tolerance.EntropyTolerance(), 0.1),
        priority.EntropyDrift(),
    )


def measured(logits: Float[Array, "b v"], heat: Float[Array, " b"] | float) -> tuple[Array, Array]:
    """Return entropy and varentropy of every row: the estimator."""
    moments = entropy.moments(logits, heat)
    return entropy.entropy(moments), entropy.varentropy(moments)


def estimator_loop(tempered: bool) -> Callable[[Array, Array], Array]:
    """Return the jitted loop of estimates; each nudges the next one's logits, so that none can be left out."""

    def run(logits: Float[Array, "b v"], repeats: Array) -> Float[Array, " b"]:
        def body(_: Array, nudge: Float[Array, " b"]) -> Float[Array, " b"]:
            h, v = measured(logits + nudge[:, None], 1.0 + nudge if tempered else 1.0)
            return 1e-6 * (h + v)

        return jax.lax.fori_loop(0, repeats, body, jnp.zeros(logits.shape[0], jnp.float32))

    return jax.jit(run)


@jax.jit
def laws_loop(signals: Signals, state: ControlState, repeats: Array) -> ControlState:
    """Return the state after `repeats` tokens of every row; each token's signals depend on the state before it."""

    def body(_: Array, state: ControlState) -> ControlState:
        nudge = 1e-6 * state.temperature

        def nudged(x: Array) -> Array:
            return x + nudge if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.vmap(laws())(jax.tree.map(nudged, signals), state)

    return jax.lax.fori_loop(0, repeats, body, state)


def measure(batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the microseconds of a step and of every part, in all turns, and the median shares."""
    controller = Controller(law=laws())
    config = whole_context(SMOLLM_135M, batch, "bfloat16", max_steps=STEPS, controller=controller)
    params = initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16)
    begin = jax.jit(partial(filled, config, args.context, 1.0))
    steps = jax.jit(partial(decode, config), donate_argnums=1)
    logits = 2.0 * jax.random.normal(jax.random.key(1), (batch, SMOLLM_135M.vocab_size), jnp.float32)
    first = begin()
    signals = replace(first.signals, entropy=jnp.full(batch, 2.0), entropy_high=jnp.full(batch, 2.0))
    loops = {
        "estimator, raw": partial(estimator_loop(False), logits),
        "estimator, tempered": partial(estimator_loop(True), logits),
        "laws": partial(laws_loop, signals, first.control),
    }
    times: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    for turn in range(args.rounds + 1):
        spent = {"step": _decode_seconds(steps, (params,), begin())}
        for name, loop in loops.items():
            spent[name] = _seconds(loop, args.repeats)
        if turn:  # the first compiles
            for name, seconds in spent.items():
                times[name].append(1e6 * seconds)
    shares = {name: float(np.median(np.array(times[name]) / times["step"])) for name in PARTS}
    total = np.sum([times[name] for name in PARTS], axis=0) / times["step"]
    medians = {name: float(np.median(each)) for name, each in times.items()}
    return {"batch": batch, "median_us": medians, "median_share": shares | {"together": float(np.median(total))}}


def _decode_seconds(steps: Callable, weights: tuple[Params], state: Any) -> float:
    state = jax.block_until_ready(state)
    began = time.perf_counter()
    _, _, ran = jax.block_until_ready(steps(weights, state, jnp.int32(STEPS)))
    return (time.perf_counter() - began) / int(ran)


def _seconds(loop: Callable[[Array], Any], repeats: int) -> float:
    began = time.perf_counter()
    jax.block_until_ready(loop(jnp.int32(repeats)))
    return (time.perf_counter() - began) / repeats


def large_model() -> dict[str, float]:
    """Return FLOPs and bytes of one row's estimate as XLA counts them, beside a bfloat16 token of a Llama-3-8B.

    XLA counts an exponential as one transcendental, apart from FLOPs; here each counts as one FLOP.
    """
    c = LLAMA_3_8B
    shape = jax.ShapeDtypeStruct((1, c.vocab_size), jnp.float32)
    counted = jax.jit(lambda logits: measured(logits, 1.0)).lower(shape).compile().cost_analysis() or {}
    weights = num_multiplied(c)
    return {
        "estimator_flops": counted["flops"] + counted.get("transcendentals", 0.0),
        "token_flops": 2.0 * weights,
        "estimator_bytes": counted["bytes accessed"],
        "logit_bytes": 4.0 * math.prod(shape.shape),
        "weight_bytes": 2.0 * weights,
    }


def main() -> None:
    parser = arguments.parser(__doc__, results="overhead.json")
    parser.add_argument(
        "--batch", type=arguments.count(), nargs="+", default=[2, 16], help="rows of a step (default 2 16)"
    )
    parser.add_argument("--context", type=arguments.count(), default=64, help="tokens held at the start (default 64)")
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="turns of every line (default 9)")
    parser.add_argument("--repeats", type=arguments.count(), default=200, help="passes of a loop (default 200)")
    args = parser.parse_args()
    results = [measure(batch, args) for batch in args.batch]
    large = large_model()
    print(serving_tables.overhead(results, large))
    settings = {name: getattr(args, name) for name in ("context", "rounds", "repeats")} | {"dtype": "bfloat16"}
    model = "random weights in the shape of SmolLM-135M"
    write(args.output, "scripts/bench_overhead.py", settings | {"model": model}, rows=results, llama_3_8b=large)


if __name__ == "__main__":
    main()
