"""How many of a mixture's experts a token goes to: as many as trained, or fewer, by its gate and by entropy.

A rule sees one token: how probable its experts are to the gate, and the entropy of the prediction that it was drawn
from. So no text depends on its company. Prompts are read as trained.
"""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.types import MaybeCount, Number, value


class ExpertRule:
    """Says how many of the likeliest experts a token goes to. Derive from it, as a `value`.

    A rule of which `by_entropy` is true goes by the prediction that the token was drawn from, which must be known
    before the token is read.
    """

    by_entropy: ClassVar[bool] = False

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return a number of experts, which counts as 1 below 1, and as all of them above.

        `probability` is what the gate gives those that the token goes to as trained, likeliest first. `entropy` is that
        of the sequence's last prediction, in nats, infinite where there was none.
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
    """As few experts as hold a `share` of the probability of all that the token goes to as trained.

    So at most 1 - share of what they weigh together is left out; at 1 nothing is.
    """

    share: Number = 0.9

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def __call__(self, probability: Float[Array, " c"], entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the least number that holds the share."""
        return _holding(probability, jnp.asarray(self.share, jnp.float32))


@value
class Entropy(ExpertRule):
    """As few experts as hold a share that grows from `least` to 1 with doubt: the sequence's, or the gate's.

        share = least + (1 - least) (1 - (1 - min(H / scale, 1)) (1 - gate h))

    H is the entropy of the sequence's last prediction, and at `scale` nats all experts are taken; h is the entropy of
    the probabilities over its maximum, and `gate`, from 0 to 1, what it counts.
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
        """Return the least number that holds the share of this doubt."""
        doubt = 1.0 - (1.0 - jnp.minimum(entropy / self.scale, 1.0)) * (1.0 - self.gate * _spread(probability))
        return _holding(probability, self.least + (1.0 - self.least) * doubt)


RULES: dict[str, type[ExpertRule]] = {"top_k": TopK, "mass": Mass, "entropy": Entropy}
"""The rules by their names, each with the numbers it has by default."""

SHARES = {"mass": "share", "entropy": "least"}
"""The number of a rule that is a share of the probability, by the rule's name."""


def _check_share(name: str, given: Number) -> None:
    if isinstance(given, float | int) and not 0 <= given <= 1:
        raise ValueError(f"{name}: got {given}, wanted a share, from 0 to 1")


def _sums(x: Float[Array, " c"]) -> list[Float[Array, ""]]:
    """The sums of all before each number, and of all, in one order whatever stands beside them."""
    sums = [jnp.zeros((), x.dtype)]
    for i in range(x.shape[0]):
        sums.append(sums[-1] + x[i])
    return sums


def _holding(probability: Float[Array, " c"], share: Float[Array, ""]) -> Int[Array, ""]:
    """The least number of probabilities, in turn, that come to a share of their sum."""
    *before, whole = _sums(probability)

    def wanted(sum: Float[Array, ""]) -> Bool[Array, ""]:
        return (sum < share * whole) | (share >= 1.0)

    return jnp.sum(jnp.stack([wanted(sum) for sum in before]), dtype=jnp.int32)


def _spread(probability: Float[Array, " c"]) -> Float[Array, ""]:
    """The entropy of probabilities, over that of as many equal ones; 0 of one alone."""
    if probability.shape[0] == 1:
        return jnp.zeros((), probability.dtype)
    part = probability / _sums(probability)[-1]
    terms = -part * jnp.log(jnp.maximum(part, jnp.finfo(part.dtype).tiny))
    return _sums(terms)[-1] / jnp.log(float(probability.shape[0]))
