"""The expected error of replacing blocks by their mean values, and a selector that bounds it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.select import fewest
from et_jax.control.selector import SUMMARIES, Selection, Selector
from et_jax.control.view import BlockView, Need, exact_at_tail, likeliest_log_mass
from et_jax.sums import softmax
from et_jax.types import Number, value

_NEEDS: frozenset[Need] = frozenset({"codes", "sensitivity"})


def squared_error(view: BlockView) -> Float[Array, "g n"]:
    """Return the expected squared error of the output if a block's mean value replaces it: units of the values squared.

    A block of n keys with mass a and weights w within errs by a |sum_i (w_i - 1/n) v_i|. For values that are
    independent of the weights and at distance r from their mean this is a^2 r^2 sum_i (w_i - 1/n)^2, and

        sum_i (w_i - 1/n)^2 ~ 2 J / n,  J = log Z - log n - mean score = KL(even || w) >= 0

    for weights that are nearly even; it is below 1 for all. J is the gap in Jensen's inequality, and is known
    before a key is read. r is the greatest distance of a value from the mean, Z the mass by 8-bit keys, whose scores
    have that mean. Raises ValueError for a view without them.
    """
    if view.coded_mean is None:
        raise ValueError("squared_error: this view has no key codes; a selector declares them by `needing`.")
    log_mass = likeliest_log_mass(view)
    count = jnp.maximum(view.num_tokens, 1).astype(jnp.float32)
    gap = jnp.maximum(log_mass - jnp.log(count) - view.coded_mean, 0.0)
    uneven = jnp.minimum(2.0 * gap / count, 1.0)
    far = jnp.where(view.num_tokens > 0, view.value_radius, 0.0)
    return jnp.square(softmax(log_mass) * far) * jnp.where(view.num_tokens > 0, uneven, 0.0)


@value
class ExpectedError(Selector):
    """The fewest blocks that leave an expected error of at most the tolerance, nats per token to an order of magnitude.

    If unread blocks count as their mean value (`Controller.residual`), each adds
    `squared_error` to the squared error of a head's output, and to the next token's divergence that times the model's
    sensitivity to the head, which `et_jax.calibrate` measures. Every query head of the model may use an
    equal share of the tolerance, on the blocks of least error, the tail aside. Errors are assumed independent; if
    they are aligned they add up, and the divergence is many times the tolerance (docs/evidence.md).
    The mass bounds are certain. Ties open together; tolerance 0 opens everything.
    """

    slack: Number = 1e-3

    @property
    def needs(self) -> frozenset[Need]:
        """8-bit keys and the model's sensitivity."""
        return SUMMARIES | _NEEDS

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks of the greatest expected error."""
        if view.coded is None or view.sensitivity is None:
            raise ValueError("ExpectedError: this view has no key codes, or no sensitivity of its heads.")
        opened = fewest(view, view.sensitivity[:, None] * squared_error(view))
        upper = exact_at_tail(view, view.coded.high) + self.slack
        return Selection(opened=opened, estimate=likeliest_log_mass(view), upper=upper)
