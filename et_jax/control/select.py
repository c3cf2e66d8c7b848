"""Which blocks of the cache a query reads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import bounds
from et_jax.control.bisect import reach
from et_jax.types import pytree


@pytree
class BlockView:
    """What is known of one sequence's blocks, for one layer and KV head, without reading them.

    `query` holds the group's queries, scaled so that query . key is the attention score.
    `value_radius` is the greatest distance of a value from the block's mean value. Blocks cover
    positions `start` to `start + num_tokens - 1`; `num_tokens` is 0 where the sequence holds no block.
    `length` counts its tokens. `tolerance` is the attention mass that may be left unread.
    """

    query: Float[Array, "g d"]
    key_min: Float[Array, "n d"]
    key_max: Float[Array, "n d"]
    key_mean: Float[Array, "n d"]
    value_mean: Float[Array, "n d"]
    value_radius: Float[Array, " n"]
    start: Int[Array, " n"]
    num_tokens: Int[Array, " n"]
    length: Int[Array, ""]
    tolerance: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Selector:
    """Chooses blocks from a `BlockView`: True means read.

    The block being written is read whatever a selector says, and blocks a sequence does not hold never
    are. `reads_all` promises that the mask is all True, which lets the step skip the summaries.
    """

    mask: Callable[[BlockView], Bool[Array, " n"]]
    reads_all: bool = False

    def __call__(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read."""
        return self.mask(view)


AnySelector = Selector | Callable[[BlockView], Bool[Array, " n"]]


def dense() -> Selector:
    """Every block."""
    return Selector(lambda view: jnp.ones(view.start.shape, bool), reads_all=True)


def sinks_window(sinks: int = 4, window: int = 256) -> Selector:
    """The blocks of the first `sinks` and of the last `window` tokens (StreamingLLM, Xiao et al. 2023)."""

    def mask(view: BlockView) -> Bool[Array, " n"]:
        end = view.start + view.num_tokens
        return (view.start < sinks) | (end > view.length - window)

    return Selector(mask)


def guarded(selector: AnySelector, sinks: int = 16, window: int = 64, min_blocks: int = 3) -> Selector:
    """The blocks `selector` opens, those of the first `sinks` and last `window` tokens, and `min_blocks` at least.

    A minimum is filled with the blocks of the greatest estimated mass (see `mass`), ties together. 0
    switches a guard off. Opening more only adds to the mass read, so a certificate holds as before. The
    defaults are a starting point; three blocks are Quest's least. Source: Entropic-Time Inference,
    section 3.3 (minimum active-block budget).
    """
    if isinstance(selector, Selector) and selector.reads_all:
        return selector
    kept = sinks_window(sinks, window)

    def mask(view: BlockView) -> Bool[Array, " n"]:
        opened = (selector(view) | kept(view)) & (view.num_tokens > 0)
        if min_blocks == 0:
            return opened
        likely = jnp.max(jax.nn.log_softmax(_log_mass(view), axis=-1), axis=0)
        return opened | _most(jnp.where(opened, jnp.inf, likely), min_blocks, view)

    return Selector(mask)


def quest(num_blocks: int) -> Selector:
    """The `num_blocks` blocks with the greatest possible score: max over the group of sum_c max(q_c min_c, q_c max_c).

    A fixed budget: it certifies nothing and ignores the tolerance. Ties at the last place are all read.
    Source: Quest (Tang et al. 2024).
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        return _most(jnp.max(bounds.box(view.query, view.key_min, view.key_max).high, axis=0), num_blocks, view)

    return Selector(mask)


def _most(score: Float[Array, " n"], num_blocks: int, view: BlockView) -> Bool[Array, " n"]:
    """Return the `num_blocks` held blocks with the greatest score, or all where fewer are held; ties together."""
    held = view.num_tokens > 0
    score = jnp.where(held, score, -jnp.inf)[None]
    return reach(score, lambda opened: jnp.sum(opened & held, axis=-1) >= num_blocks)[0] & held


def _log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the log of n e^{q . mean key}, a block's mass were its keys all alike; the least float if not held."""
    held = view.num_tokens > 0
    log_count = jnp.log(jnp.maximum(view.num_tokens, 1).astype(jnp.float32))
    return jnp.where(held, log_count + bounds.scores(view.query, view.key_mean), jnp.finfo(jnp.float32).min)


def top_mass() -> Selector:
    """The fewest blocks that leave at most the tolerance of the estimated mass unread, for every query head.

    The estimate takes a block's keys for their mean, so nothing is certified. Ties open together;
    tolerance 0 opens everything. Source: the top-p of Twilight (Lin et al. 2025), over blocks.
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        share = jax.nn.softmax(_log_mass(view), axis=-1)

        def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
            return jnp.sum(jnp.where(opened, 0.0, share), axis=-1) <= view.tolerance

        return jnp.any(reach(share, allowed), axis=0) | (view.tolerance <= 0)

    return Selector(mask)


MassBounds = Callable[[BlockView], bounds.Interval]
"""Bounds on the log of each block's attention mass, in nats, for each query head of the group."""


def chord_bounds(view: BlockView) -> bounds.Interval:
    """Return the sharpest bounds that a page's box and mean key allow: chord above, Jensen below."""
    score = bounds.box(view.query, view.key_min, view.key_max)
    return bounds.log_mass(score, bounds.scores(view.query, view.key_mean), view.num_tokens)


def box_bounds(view: BlockView) -> bounds.Interval:
    """Return the bounds that a page's box alone allows."""
    return bounds.box_mass(bounds.box(view.query, view.key_min, view.key_max), view.num_tokens)


def certified(mass_bounds: MassBounds = chord_bounds, slack: float = 1e-3) -> Selector:
    """Blocks that provably hold all but the tolerance of every query head's attention mass.

    Opens blocks by their upper bound U_b until U_D <= eps / (1 - eps) L_S, with U_D the sum over closed
    blocks and L_S that of the lower bounds over opened ones: then the mass left unread is at most
    U_D / (Z_S + U_D) <= eps. Where the bounds are too wide to prove it, everything is opened. `slack`, in
    nats, widens both bounds against rounding. Ties open together; tolerance 0 opens everything. It holds
    for the query and the stored keys of this head and step, and says nothing of the step's output.
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        log = mass_bounds(view)
        top = jnp.max(log.high, axis=-1, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        upper, lower = jnp.exp(log.high + slack - top), jnp.exp(log.low - slack - top)

        def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
            unread = jnp.sum(jnp.where(opened, 0.0, upper), axis=-1)
            read = jnp.sum(jnp.where(opened, lower, 0.0), axis=-1)
            return (1.0 - view.tolerance) * unread <= view.tolerance * read

        return jnp.any(reach(log.high, allowed), axis=0) | (view.tolerance <= 0)

    return Selector(mask)


Contribution = Callable[[BlockView], Float[Array, "g n"]]
"""An estimate of E_b, what each block contributes to each query head, made without reading the block."""


def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the estimated share of attention mass in each block, in [0, 1]: E_b with surprisal 1."""
    return jax.nn.softmax(_log_mass(view), axis=-1)


def influence(view: BlockView) -> Float[Array, "g n"]:
    """Return how far the output would move without the block: a_b / (1 - a_b) |v_b - o|, in units of the values.

    Exact where a_b is the block's mass, v_b its own output and o the whole output; here the estimated
    mass, the mean value and the mean of those. Infinite for a block that holds all the mass.
    """
    share, value = mass(view), _held_values(view)
    apart = jnp.linalg.norm(value[None] - jnp.matmul(share, value)[:, None], axis=-1)
    rest = 1.0 - share
    return jnp.where(rest > 0, share * apart / jnp.where(rest > 0, rest, 1.0), jnp.inf)


def _held_values(view: BlockView) -> Float[Array, "n d"]:
    return jnp.where((view.num_tokens > 0)[:, None], view.value_mean.astype(jnp.float32), 0.0)


def value_gauss(view: BlockView) -> Float[Array, "g n"]:
    """Return mass times 1/2 sum_c (v_c - mu_c)^2 / s_c^2, in nats: the surprisal of a block's mean value.

    Under a normal fitted, channel by channel, to the mean values of the blocks held; what values differ
    within a block is not stored and not counted.
    """
    weight = view.num_tokens.astype(jnp.float32)[:, None]
    weight = weight / jnp.maximum(jnp.sum(weight), 1.0)
    value = _held_values(view)
    apart = value - jnp.sum(weight * value, axis=0)
    variance = jnp.sum(weight * apart * apart, axis=0)
    ratio = apart * apart / jnp.maximum(variance, jnp.finfo(jnp.float32).tiny)
    return mass(view) * (0.5 * jnp.sum(ratio, axis=-1))


def expected_surprisal(view: BlockView, mean_surprisal: Float[Array, " n"]) -> Float[Array, "g n"]:
    """Return mass times the mean surprisal of the block's tokens, in nats, for a surprisal stored per block.

    With -log p(x_i | x_<i) of its tokens it is the reading of E_b as token surprisal.
    """
    return mass(view) * mean_surprisal


def paper(contribution: Contribution = influence) -> Selector:
    """The blocks with E_b > theta for some query head, theta = `tolerance`: the active set as printed.

    E_b = sum_{i in b} alpha_i s(v_i), s the surprisal "associated with the value vector", which the
    paper does not define; `contribution` chooses what stands in, and so the unit of theta. theta 0 opens
    everything. Source: Entropic-Time Inference, section 3.2.
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        return jnp.any(contribution(view) > view.tolerance, axis=0) | (view.tolerance <= 0)

    return Selector(mask)
