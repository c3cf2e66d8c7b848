"""How many of a mixture's experts a token is routed to: as many as trained, or fewer, by its gate and by entropy.

A rule reads one token: the gate's probabilities of its experts, and the entropy of the prediction that it was sampled
from. Outputs therefore do not depend on the batch. Prompts use as many experts as trained.
"""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.types import MaybeCount, Number, value


class ExpertRule:
    """Sets how many of the likeliest experts a token is routed to. Derive from it, as a `value`.

    A rule with `by_entropy` reads the entropy of the prediction that the token was sampled from, which must be known
    before the token is processed.
    """

    by_entropy: ClassVar[bool] = False

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return a number of experts; the caller clips it to between 1 and the trained number.

        `probability` has the gate's probabilities of the trained number of experts, likeliest first. `entropy` is that
        of the sequence's last prediction, in nats, infinite if there was none.
        """
        raise NotImplementedError


@value
class TopK(ExpertRule):
    """As many experts as trained, or `most` of them."""

    most: MaybeCount = None

    def __post_init__(self) -> None:
        if isinstance(self.most, int) and self.most < 1:
            raise ValueError(f"most: got {self.most}, wanted at least 1, or None")

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return that number."""
        return jnp.asarray(probability.shape[0] if self.most is None else self.most, jnp.int32)


@value
class Mass(ExpertRule):
    """The fewest experts with a `share` of the probability of those that the token is routed to as trained.

    Omits at most 1 - share of their total weight, and none at share 1.
    """

    share: Number = 0.9

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the least number with that share."""
        return _holding(probability, jnp.asarray(self.share, jnp.float32))


@value
class Entropy(ExpertRule):
    """The fewest experts with a share that grows from `least` to 1 with uncertainty: the sequence's, or the gate's.

        share = least + (1 - least) (1 - (1 - min(H / scale, 1)) (1 - gate h))

    H is the entropy of the sequence's last prediction, and at `scale` nats all experts are used; h is the entropy of
    the probabilities over its maximum, and `gate`, from 0 to 1, its weight.
    """

    by_entropy = True
    least: Number = 0.5
    scale: Number = 2.0
    gate: Number = 0.5

    def __post_init__(self) -> None:
        _check_share("least", self.least)
        _check_share("gate", self.gate)
        if isinstance(self.scale, float | int) and not self.scale > 0:
            raise ValueError(f"scale: got {self.scale}, wanted above 0 nats")

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the least number with the share for this uncertainty."""
        doubt = 1.0 - (1.0 - jnp.minimum(entropy / self.scale, 1.0)) * (1.0 - self.gate * _spread(probability))
        return _holding(probability, self.least + (1.0 - self.least) * doubt)


RULES: dict[str, type[ExpertRule]] = {"top_k": TopK, "mass": Mass, "entropy": Entropy}
"""The rules by name, with default numbers."""

SHARES = {"mass": "share", "entropy": "least"}
"""The name of the rule's field that is a share of the probability, by the rule's name."""


def _check_share(name: str, given: Number) -> None:
    if isinstance(given, float | int) and not 0 <= given <= 1:
        raise ValueError(f"{name}: got {given}, wanted a share, from 0 to 1")


def _sums(x: Float[Array, " c"]) -> list[Float[Array, ""]]:
    """Return the sums of all numbers before each one, and of all, added in a fixed order."""
    sums = [jnp.zeros((), x.dtype)]
    for i in range(x.shape[0]):
        sums.append(sums[-1] + x[i])
    return sums


def _holding(probability: Float[Array, " c"], share: Float[Array, ""]) -> Int[Array, ""]:
    """Return the least number of leading probabilities whose sum reaches a share of the total."""
    *before, full = _sums(probability)

    def wanted(sum: Float[Array, ""]) -> Bool[Array, ""]:
        return (sum < share * full) | (share >= 1.0)

    return jnp.sum(jnp.stack([wanted(sum) for sum in before]), dtype=jnp.int32)


def _spread(probability: Float[Array, " c"]) -> Float[Array, ""]:
    """Return the entropy of probabilities over that of as many equal ones; 0 for a single one."""
    if probability.shape[0] == 1:
        return jnp.zeros((), probability.dtype)
    part = probability / _sums(probability)[-1]
    terms = -part * jnp.log(jnp.maximum(part, jnp.finfo(part.dtype).tiny))
    return _sums(terms)[-1] / jnp.log(float(probability.shape[0]))
