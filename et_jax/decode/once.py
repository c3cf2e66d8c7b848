"""Optional parts of a program, without a copy of the page pools that they may touch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from et_jax.pallas.backend import platform

C = TypeVar("C")
G = TypeVar("G")
T = TypeVar("T")


def run_if(asked: Bool[Array, ""], run: Callable[[C, G], C], carry: C, given: G) -> C:
    """Return `run(carry, given)` if it is asked for, else the carry.

    It is a loop of one trip or none: compiled for a TPU, a conditional copies every pool that its branches touch, even
    if they only read it. XLA hoists loop-invariant work out of the loop and runs it regardless of
    the trips. So all of the work must depend on `given`, which passes through a barrier; weights need not.
    """

    def trip(_: Array, both: tuple[C, G]) -> tuple[C, G]:
        carry, given = both[0], jax.lax.optimization_barrier(both[1])
        return run(carry, given), given

    return jax.lax.fori_loop(0, asked.astype(jnp.int32), trip, (carry, given))[0]


def run_for(wanted: Bool[Array, " r"] | None, run: Callable[[G], T], rows: G) -> T:
    """Return `run(rows)`, with all leaves "r ...", of which only `wanted` rows are used; None is all of them.

    A CPU runs the wanted rows one after the other, and returns zeros for the others. A TPU runs all rows if one is
    wanted, else none, and a GPU, which would synchronise with the host for that, always runs all.
    """
    if wanted is None or platform() == "gpu":
        return run(rows)

    def if_wanted(wanted: Bool[Array, ""], rows: G) -> T:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, rows))
        return run_if(wanted, lambda _, rows: run(rows), zeros, rows)

    if platform() == "tpu":
        return if_wanted(jnp.any(wanted), rows)

    def one(row: tuple[Bool[Array, ""], G]) -> T:
        return jax.tree.map(lambda x: x[0], if_wanted(row[0], jax.tree.map(lambda x: x[None], row[1])))

    return jax.lax.map(one, (wanted, rows))
