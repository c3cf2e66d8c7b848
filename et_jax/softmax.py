"""The softmax of attention: its settings as one value, and what every kernel does with them alike."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.types import pytree, replace, static


@pytree
class Softmax:
    """What turns a query and the keys it sees into weights; with z_j the scores, weights are exp(z_j) over their sum.

        z_j = scale q.k_j        or, with a soft cap, soft_cap tanh(scale q.k_j / soft_cap)

    scale: factor on query . key.
    soft_cap: bound on the scores' size, None for none (Gemma 2, 2024).
    window: tokens a query sees, its own included, None for all (Mistral 7B, Jiang et al. 2023).
    sink_logits: one more logit a query head, in the sum only (gpt-oss, 2025).

    The sinks are its only child; the rest shapes the program.
    """

    scale: float = static()
    soft_cap: float | None = static(default=None)
    window: int | None = static(default=None)
    sink_logits: Float[Array, " h"] | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale: got {self.scale}, wanted a positive number")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap: got {self.soft_cap}, wanted a positive number or None")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: got {self.window}, wanted at least 1 token, or None")

    def require_heads(self, num_heads: int) -> None:
        """Raise ValueError unless there is a sink for every query head, or none at all."""
        if self.sink_logits is not None and self.sink_logits.shape != (num_heads,):
            raise ValueError(f"sink_logits: got shape {self.sink_logits.shape}, wanted (h={num_heads})")

    def capped(self, scores: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Return the scaled scores after the soft cap."""
        return capped(scores, self.soft_cap)

    def with_sinks(self, log_sum: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        """Return the log of the sum that weights are divided by, from that over the tokens alone."""
        sink = self.sink_logits
        return with_sink(log_sum, None if sink is None else jnp.broadcast_to(sink, log_sum.shape))

    @property
    def without_sinks(self) -> "Softmax":
        """The settings without the sinks, which a kernel takes as an array."""
        return replace(self, sink_logits=None)


def capped(scores: Float[Array, "*any"], soft_cap: float | None) -> Float[Array, "*any"]:
    """Return `soft_cap tanh(scores / soft_cap)`, which rises with the scores and by no more than they do."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def with_sink(log_sum: Float[Array, "*any"], sink: Float[Array, "*any"] | None) -> Float[Array, "*any"]:
    """Return the log of a sum with one more logit in it, where there is one."""
    return log_sum if sink is None else jnp.logaddexp(log_sum, sink.astype(jnp.float32))


def finite(maximum: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the maximum, 0 where nothing was seen: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)
