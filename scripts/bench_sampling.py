"""What sampling a token costs: by a race, by inverse CDF, greedily; of which generator the noise may come.

    python scripts/bench_sampling.py

Timed turn by turn on random logits, medians shown, in loops of which every pass needs the token before it:

    greedy          the first of the greatest logits
    inverse CDF     one uniform number a row, and partial sums over runs of the vocabulary
    race            `sample_token`: the greatest weight / E

and the noise E alone, of the whole vocabulary, from each generator of 32 bits a token:

    hash            `random_bits`
    threefry 13     Threefry-2x32 at (token, position), at the 13 rounds that pass Crush (Salmon et al. 2011), unrolled
    threefry 20     JAX's own
    Philox 7        Philox-2x32 with 7 rounds, whose wide products are made of 16-bit halves

Then whole steps of the bundled model, sampled by inverse CDF, by the race, and greedily. Nothing is asserted.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from et_jax.decode import sampling
from et_jax.decode.decoder import decode
from et_jax.decode.noise import exponential, random_bits
from et_jax.evidence import serving_tables
from et_jax.pallas.backend import pick
from et_jax.serve.engine import Model, load
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.states import filled, whole_context

LANES = 256  # vocabulary entries per partial sum of the inverse CDF
ELEMENTS = 2_000_000  # logits of one timed loop, at least
STEPS = 32  # in one call of `decode`
CONTEXT = 64  # tokens held when the steps begin

Bits = Callable[[UInt32[Array, "b 2"], Int[Array, " b"], int], UInt32[Array, "b v"]]


def inverse_cdf(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    cut: Float[Array, " b"],
    key: UInt32[Array, "b 2"],
    position: Int[Array, " b"],
) -> Int[Array, " b"]:
    """Return one token per row: partial sums find the run of the vocabulary in which u falls, then the token in it."""
    u = jax.vmap(lambda key, position: jax.random.uniform(folded(key, position)))(key, position)
    heat = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weight = jnp.where(logits >= cut[:, None], jnp.exp((logits - peak) / heat), 0.0)
    weight = jnp.pad(weight, ((0, 0), (0, -weight.shape[-1] % LANES))).reshape(weight.shape[0], -1, LANES)
    runs = jnp.cumsum(jnp.sum(weight, axis=-1), axis=-1)
    target = u * runs[:, -1]
    run = jnp.argmax(runs > target[:, None], axis=-1)
    before = jnp.where(run > 0, jnp.take_along_axis(runs, jnp.maximum(run - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
    inside = jnp.take_along_axis(weight, run[:, None, None], axis=1)[:, 0]
    lane = jnp.argmax(jnp.cumsum(inside, axis=-1) > (target - before)[:, None], axis=-1)
    return jnp.where(temperature > 0, (run * LANES + lane).astype(jnp.int32), greedy(logits))


def greedy(logits: Float[Array, "b v"], *_: Array) -> Int[Array, " b"]:
    """Return the first of the greatest of every row."""
    size = logits.shape[-1]
    peak = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == peak, jnp.arange(size, dtype=jnp.int32), size - 1), axis=-1)


def folded(key: UInt32[Array, " 2"], position: Int[Array, ""]) -> Array:
    """Return the request's key with the position folded in."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), position)


def threefry(key: UInt32[Array, "b 2"], position: Int[Array, " b"], size: int) -> UInt32[Array, "b v"]:
    """Return JAX's bits of every row's folded key."""
    return jax.vmap(lambda key, position: jax.random.bits(folded(key, position), (size,)))(key, position)


def threefry_13(key: UInt32[Array, "b 2"], position: Int[Array, " b"], size: int) -> UInt32[Array, "b v"]:
    """Return the first word of 13 rounds of Threefry-2x32 at (token, position)."""
    words = [key[:, :1], key[:, 1:], key[:, :1] ^ key[:, 1:] ^ jnp.uint32(0x1BD11BDA)]
    x = jnp.arange(size, dtype=jnp.uint32) + words[0]
    y = position.astype(jnp.uint32)[:, None] + words[1]
    for turn in range(13):
        by = jnp.uint32((13, 15, 26, 6, 17, 29, 16, 24)[turn % 8])
        x = x + y
        y = (y << by | y >> (32 - by)) ^ x
        if turn % 4 == 3:
            group = turn // 4 + 1
            x, y = x + words[group % 3], y + words[(group + 1) % 3] + jnp.uint32(group)
    return x


def philox_7(key: UInt32[Array, "b 2"], position: Int[Array, " b"], size: int) -> UInt32[Array, "b v"]:
    """Return the first word of 7 rounds of Philox-2x32, its key and second word those of the folded key."""
    words = jax.vmap(lambda key, position: jax.random.key_data(folded(key, position)))(key, position)
    x = jnp.broadcast_to(jnp.arange(size, dtype=jnp.uint32), (len(words), size))
    y, keyed = words[:, 1:], words[:, :1]
    low, high = jnp.uint32(0x6D93), jnp.uint32(0xD256)  # halves of the multiplier
    for _ in range(7):
        small, large = x & 0xFFFF, x >> 16
        middle = (small * low >> 16) + (small * high & 0xFFFF) + (large * low & 0xFFFF)
        product = large * high + (small * high >> 16) + (large * low >> 16) + (middle >> 16)
        x, y = product ^ keyed ^ y, x * jnp.uint32(0xD256D193)
        keyed = keyed + jnp.uint32(0x9E3779B9)
    return x


TOKENS: dict[str, Callable[..., Array]] = {
    "greedy": greedy,
    "inverse CDF": inverse_cdf,
    "race": sampling.sample_token,
}
GENERATORS: dict[str, Bits] = {
    "hash": random_bits,
    "threefry 13": threefry_13,
    "threefry 20": threefry,
    "Philox 7": philox_7,
}


def token_loop(token: Callable[..., Array], passes: int) -> Callable[..., Array]:
    """Return the jitted loop of tokens; each nudges the logits of the next, so that none can be left out."""

    def run(logits: Array, heat: Array, cut: Array, key: Array, position: Array) -> Array:
        def body(i: Array, last: Array) -> Array:
            nudged = jax.lax.optimization_barrier(logits + 1e-8 * last.astype(jnp.float32)[:, None])
            return token(nudged, heat, cut, key, position + i)

        return jax.lax.fori_loop(0, passes, body, jnp.zeros(len(logits), jnp.int32))

    return jax.jit(run)


def noise_loop(bits: Bits, passes: int) -> Callable[..., Array]:
    """Return the jitted loop of noise, of which the least is kept."""

    def run(logits: Array, heat: Array, cut: Array, key: Array, position: Array) -> Array:
        def body(i: Array, least: Array) -> Array:
            later = position + i + (least > 1e9).astype(jnp.int32)
            return jnp.min(exponential(bits(key, later, logits.shape[-1])), axis=-1)

        return jax.lax.fori_loop(0, passes, body, jnp.zeros(len(logits), jnp.float32))

    return jax.jit(run)


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of the milliseconds that every run takes, the first turn apart, which compiles."""
    times = [{name: 1e3 * run() for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    return {name: float(np.median([each[name] for each in times])) for name in runs}


def seconds(call: Callable[[], Any], passes: int) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - began) / passes


def measure(vocab_size: int, rows: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds a token of all rows, and milliseconds of their noise."""
    rng = np.random.default_rng(0)
    passes = max(2, min(100, ELEMENTS // (vocab_size * rows)))
    given = (
        jnp.asarray(rng.normal(0, 3, (rows, vocab_size)), jnp.float32),
        jnp.full(rows, 0.8, jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
        jnp.arange(rows, dtype=jnp.int32),
    )
    loops = {name: token_loop(token, passes) for name, token in TOKENS.items()}
    loops |= {name: noise_loop(bits, passes) for name, bits in GENERATORS.items()}
    runs = {name: partial(seconds, partial(loop, *given), passes) for name, loop in loops.items()}
    return {"vocab_size": vocab_size, "rows": rows, "milliseconds": in_turns(runs, rounds)}


def measure_step(model: Model, rows: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of a step of the bundled model, by how its tokens are sampled."""
    runs = {}
    for name, token in TOKENS.items():
        config = whole_context(model.config, rows, model.decoder_config.cache_dtype, max_steps=STEPS)
        begin = jax.jit(partial(filled, config, CONTEXT, 0.0 if name == "greedy" else 0.8))
        with mock.patch.object(sampling, "sample_token", token):
            steps = jax.jit(partial(decode, config)).lower(model.weights, begin(), jnp.int32(STEPS)).compile()

        def run(begin: Callable = begin, steps: Callable = steps) -> float:
            state = jax.block_until_ready(begin())
            return seconds(lambda: steps(model.weights, state, jnp.int32(STEPS)), STEPS)

        runs[name] = run
    return {"rows": rows, "milliseconds": in_turns(runs, rounds)}


def main() -> None:
    parser = arguments.parser(__doc__, results="sampling.json")
    parser.add_argument("--vocabularies", type=arguments.count(), nargs="+", default=[4096, 49_152, 151_936])
    parser.add_argument("--rows", type=arguments.count(), nargs="+", default=[1, 2, 16, 64])
    parser.add_argument(
        "--step-rows", type=arguments.count(), nargs="+", default=[2, 16], help="rows of a step (default 2 16)"
    )
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="turns of every line (default 9)")
    args = parser.parse_args()
    model = load()
    steps = [measure_step(model, rows, args.rounds) for rows in args.step_rows]
    cases = [measure(size, rows, args.rounds) for size in args.vocabularies for rows in args.rows]
    print(serving_tables.sampling(cases, steps))
    settings = {"rounds": args.rounds, "temperature": 0.8, "context": CONTEXT, "backend": pick()}
    write(args.output, "scripts/bench_sampling.py", settings, cases=cases, steps=steps)


if __name__ == "__main__":
    main()
