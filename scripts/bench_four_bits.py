"""Weights of 4 bits in a product on this machine, against 8 bits and bfloat16: milliseconds, by turns.

    python scripts/bench_four_bits.py [--rows 2 16]

The matrix is the embedding of SmolLM-135M's shape, drawn at random. In 4 bits it has two numbers a byte and a scale for
every group of 32 inputs, and is unpacked inside the program, in the three forms that XLA offers: to floats by their
scales, to whole numbers of 8 bits whose products are summed by group, and as JAX's own `int4`, a scale for each output.
Nothing is asserted.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.evidence import serving_tables
from et_jax.models.weights import Dense, rounded, to_int8
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import SMOLLM_135M

GROUP = 32  # inputs to a scale
Product = Callable[[Float[Array, "r i"]], Float[Array, "r o"]]


def packed(matrix: Float[np.ndarray, "o i"]) -> tuple[Array, Array]:
    """Return numbers from -7 to 7, each row's first half in the low bits and its second in the high, and the scales."""
    groups = matrix.reshape(len(matrix), -1, GROUP)
    scale = np.abs(groups).max(axis=-1) / 7
    whole = np.rint(groups / scale[..., None]).astype(np.int8).reshape(matrix.shape)
    low, high = np.split(whole, 2, axis=1)
    return jnp.asarray((low & 15) | (high << 4), jnp.int8), jnp.asarray(scale, jnp.float32)


def unpacked(both: Array) -> Array:
    """Return the whole numbers of 8 bits that were packed."""
    return jnp.concatenate([jnp.left_shift(both, 4) >> 4, both >> 4], axis=1)


def products(matrix: Float[np.ndarray, "o i"]) -> dict[str, Product]:
    """Return the product with a matrix in every form."""
    dense, whole = Dense(array=jnp.asarray(matrix, jnp.bfloat16)), jax.device_put(to_int8(matrix, jnp.bfloat16))
    both, scale = packed(matrix)
    by_output = jnp.asarray(np.abs(matrix).max(axis=1) / 7, jnp.float32)
    own = jnp.asarray(np.rint(matrix / np.asarray(by_output)[:, None]), jnp.int4)

    def to_floats(x: Array, both: Array, scale: Array) -> Array:
        weights = unpacked(both).astype(jnp.float32).reshape(*scale.shape, GROUP) * scale[..., None]
        return jnp.einsum(
            "ri,oi->ro", x, weights.reshape(len(both), -1).astype(x.dtype), preferred_element_type=jnp.float32
        )

    def by_group(x: Array, both: Array, scale: Array) -> Array:
        rows, of_row = rounded(x)
        of_groups = (one.reshape(len(one), -1, GROUP) for one in (rows, unpacked(both)))
        sums = jnp.einsum("rgi,ogi->gro", *of_groups, preferred_element_type=jnp.int32).astype(jnp.float32)
        return jnp.einsum("gro,og->ro", sums, scale) * of_row[:, None]

    def by_own(x: Array, own: Array, by_output: Array) -> Array:
        rows, of_row = rounded(x)
        sums = jnp.einsum("ri,oi->ro", rows, own.astype(jnp.int8), preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * of_row[:, None] * by_output

    def bound(function: Callable[..., Array], *held: Array) -> Product:
        jitted = jax.jit(function)
        return lambda x: jitted(x, *held)

    multiply = jax.jit(lambda weight, x: weight.matmul(x))
    return {
        "bfloat16": lambda x: multiply(dense, x),
        "8 bits": lambda x: multiply(whole, x),
        "4 bits, to floats": bound(to_floats, both, scale),
        "4 bits, by group": bound(by_group, both, scale),
        "4 bits, JAX's int4": bound(by_own, own, by_output),
    }


def measured(forms: dict[str, Product], rows: int, rounds: int) -> dict:
    """Return the milliseconds of a product of `rows` rows in every form, and how many times those of 8 bits."""
    x = jax.random.normal(jax.random.key(rows), (rows, SMOLLM_135M.hidden_size), jnp.bfloat16)
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, product in forms.items():
            began = time.perf_counter()
            jax.block_until_ready(product(x))
            taken[name].append(1e3 * (time.perf_counter() - began))
    taken = {name: times[1:] for name, times in taken.items()}  # the first compiles
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, taken["8 bits"], strict=True))
        for name, times in taken.items()
    }
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {"rows": rows, "milliseconds": medians, "over_8_bits": ratios}


def main() -> None:
    """Measure every number of rows, print the table and write the figures."""
    parser: argparse.ArgumentParser = arguments.parser(__doc__, results="four_bits.json")
    parser.add_argument("--rows", type=arguments.count(2), nargs="+", default=[2, 16], help="of a product (2 16)")
    parser.add_argument("--rounds", type=arguments.count(), default=9, help="turns of every form (default 9)")
    args = parser.parse_args()
    shape = SMOLLM_135M.vocab_size, SMOLLM_135M.hidden_size
    forms = products(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    cases = [measured(forms, rows, args.rounds) for rows in args.rows]
    print(serving_tables.four_bits(cases))
    write(args.output, "scripts/bench_four_bits.py", {"rounds": args.rounds}, cases=cases)


if __name__ == "__main__":
    main()
