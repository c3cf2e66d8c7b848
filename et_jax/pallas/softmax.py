"""The softmax of attention: its settings as one value, and what every kernel does with them alike."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.pallas.checks import require, require_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax:
    """What turns a query and the keys it sees into weights; with z_j the scores, weights are exp(z_j) over their sum.

        z_j = scale q.k_j        or, with a soft cap, soft_cap tanh(scale q.k_j / soft_cap)

    scale: factor on query . key.
    soft_cap: bound on the scores' size, None for none (Gemma 2, 2024).
    window: tokens a query sees, its own included, None for all (Mistral 7B, Jiang et al. 2023).
    sink_logits: one more logit a query head, in the sum only (gpt-oss, 2025).

    A pytree: the sinks are its only child; the rest shapes the program.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    sink_logits: Float[Array, " h"] | None = None

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale", self.scale, "a positive number")
        require(self.soft_cap is None or self.soft_cap > 0, "soft_cap", self.soft_cap, "a positive number or None")
        require(self.window is None or self.window >= 1, "window", self.window, "at least 1 token, or None")

    def require_heads(self, num_heads: int) -> None:
        """Raise ValueError unless there is a sink for every query head, or none at all."""
        if self.sink_logits is not None:
            require_shape("sink_logits", self.sink_logits, (num_heads,), "h")

    def capped(self, scores: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Return the scaled scores after the soft cap."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    @property
    def static(self) -> "Softmax":
        """The settings without the sinks, which a kernel takes as an array."""
        return dataclasses.replace(self, sink_logits=None)


def _flatten(softmax: Softmax) -> tuple[tuple[object], tuple[object, ...]]:
    return (softmax.sink_logits,), (softmax.scale, softmax.soft_cap, softmax.window)


def _unflatten(settings: tuple[object, ...], children: tuple[object]) -> Softmax:
    """Rebuild around what may be no array, which a shape-checking `__init__` would refuse."""
    softmax = object.__new__(Softmax)
    vars(softmax).update(zip(("scale", "soft_cap", "window", "sink_logits"), (*settings, *children), strict=True))
    return softmax


jax.tree_util.register_pytree_node(Softmax, _flatten, _unflatten)


def finite(maximum: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the maximum, 0 where nothing was seen: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)
