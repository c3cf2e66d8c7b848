"""Entropies told to the wrong sequence or at the wrong token: what is left of a law's effect is not the signal's.

of_others    each sequence is told those of another, in their order: the course of a text, of another text
reordered    each is told its own, in another order: the values of a text, not its course
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control.base import AnyLaw, ControlState, Law, Signals, as_value, started, updated
from et_jax.types import replace, value


@value
class Told(Law):
    """The law shown `entropies`, in nats, one after another, in place of the raw entropy and its interval.

    The last of them is shown again to a sequence that produces more tokens.
    """

    law: AnyLaw
    entropies: Float[Array, " t"]

    @property
    def sets(self) -> frozenset[str] | None:
        """What the law sets."""
        return as_value(self.law).sets

    def __post_init__(self) -> None:
        object.__setattr__(self, "law", as_value(self.law))

    def init(self, state: ControlState) -> ControlState:
        """Start the law."""
        return started(self.law, state)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Let the law decide by what it is told."""
        told = self.entropies[jnp.clip(signals.generated - 1, 0, len(self.entropies) - 1)]
        return updated(self.law, replace(signals, entropy=told, entropy_low=told, entropy_high=told), state)


def of_others(entropies: Sequence[Float[np.ndarray, " _"]], rng: np.random.Generator) -> list[Float[np.ndarray, " _"]]:
    """Return for each of at least two sequences the entropies of another, repeated or cut to its own length."""
    order = rng.permutation(len(entropies))
    source = np.empty_like(order)
    source[order] = np.roll(order, 1)  # one circle through all, so that none is told its own
    return [np.resize(entropies[other], len(own)) for own, other in zip(entropies, source, strict=True)]


def reordered(entropies: Sequence[Float[np.ndarray, " _"]], rng: np.random.Generator) -> list[Float[np.ndarray, " _"]]:
    """Return for each sequence its own entropies in a random order."""
    return [rng.permutation(own) for own in entropies]
