"""An optional part of a program, without a copy of the page pools that it may touch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

C = TypeVar("C")
G = TypeVar("G")


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
