"""Which blocks of the cache a query reads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control import bounds
from et_jax.control.bisect import above_threshold
from et_jax.control.contribution import Contribution, influence
from et_jax.control.view import BlockView, log_mass, mass
from et_jax.types import pytree, replace


@pytree
class Selection:
    """The blocks to read, and what is thought of each block's attention mass: logs, per query head, in nats.

    `upper` is certain, and None where the selector knows no bound; `estimate` is a guess.
    """

    opened: Bool[Array, "*b n"]
    estimate: Float[Array, "*b g n"]
    upper: Float[Array, "*b g n"] | None


@dataclasses.dataclass(frozen=True)
class Selector:
    """Chooses blocks from a `BlockView`.

    The block being written is read whatever a selector says, and blocks a sequence does not hold never
    are. `reads_all` promises that every block is opened, which lets the step skip the summaries.
    """

    choose: Callable[[BlockView], Selection]
    reads_all: bool = False

    def __call__(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read: True means read."""
        return self.choose(view).opened


Mask = Callable[[BlockView], Bool[Array, " n"]]
AnySelector = Selector | Mask
"""A plain function from a view to a mask, True meaning read, serves where a selector is wanted."""


def as_selector(selector: AnySelector) -> Selector:
    """Return a selector as it is, or the one that opens what a plain function answers."""
    if isinstance(selector, Selector):
        return selector
    return Selector(lambda view: Selection(opened=selector(view), estimate=log_mass(view), upper=None))


def dense() -> Selector:
    """Every block."""
    every = as_selector(lambda view: jnp.ones(view.start.shape, bool))
    return dataclasses.replace(every, reads_all=True)


def sinks_window(sinks: int = 4, window: int = 256) -> Selector:
    """The blocks of the first `sinks` and of the last `window` tokens (StreamingLLM, Xiao et al. 2023)."""

    def mask(view: BlockView) -> Bool[Array, " n"]:
        end = view.start + view.num_tokens
        return (view.start < sinks) | (end > view.length - window)

    return as_selector(mask)


def guarded(selector: AnySelector, sinks: int = 16, window: int = 64, min_blocks: int = 3) -> Selector:
    """The blocks `selector` opens, those of the first `sinks` and last `window` tokens, and `min_blocks` at least.

    A minimum is filled with the blocks of the greatest estimated mass (see `view.mass`), ties together. 0
    switches a guard off. Opening more only adds to the mass read, so a certificate holds as before. The
    defaults are a starting point; three blocks are Quest's least. Source: Entropic-Time Inference,
    section 3.3 (minimum active-block budget).
    """
    inner, kept = as_selector(selector), sinks_window(sinks, window)
    if inner.reads_all:
        return inner

    def choose(view: BlockView) -> Selection:
        chosen = inner.choose(view)
        opened = (chosen.opened | kept(view)) & (view.num_tokens > 0)
        if min_blocks:
            likely = jnp.max(jax.nn.log_softmax(log_mass(view), axis=-1), axis=0)
            opened |= _most(jnp.where(opened, jnp.inf, likely), min_blocks, view)
        return replace(chosen, opened=opened)

    return Selector(choose)


def quest(num_blocks: int) -> Selector:
    """The `num_blocks` blocks with the greatest possible score: max over the group of sum_c max(q_c min_c, q_c max_c).

    A fixed budget: it certifies nothing and ignores the tolerance. Ties at the last place are all read.
    Source: Quest (Tang et al. 2024).
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        return _most(jnp.max(view.score.high, axis=0), num_blocks, view)

    return as_selector(mask)


def _most(score: Float[Array, " n"], num_blocks: int, view: BlockView) -> Bool[Array, " n"]:
    """Return the `num_blocks` held blocks with the greatest score, or all where fewer are held; ties together."""
    held = view.num_tokens > 0
    score = jnp.where(held, score, -jnp.inf)[None]
    return above_threshold(score, lambda opened: jnp.sum(opened & held, axis=-1) >= num_blocks)[0] & held


def top_mass() -> Selector:
    """The fewest blocks that leave at most the tolerance of the estimated mass unread, for every query head.

    The estimate takes a block's keys for their mean, so nothing is certified. Ties open together;
    tolerance 0 opens everything. Source: the top-p of Twilight (Lin et al. 2025), over blocks.
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        share = mass(view)

        def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
            return jnp.sum(jnp.where(opened, 0.0, share), axis=-1) <= view.tolerance

        return jnp.any(above_threshold(share, allowed), axis=0) | (view.tolerance <= 0)

    return as_selector(mask)


def paper(contribution: Contribution = influence) -> Selector:
    """The blocks with E_b > theta for some query head, theta = `tolerance`: the active set as printed.

    `contribution` chooses what stands in for the surprisal in E_b = sum_{i in b} alpha_i s(v_i), and so
    the unit of theta. theta 0 opens everything. Source: Entropic-Time Inference, section 3.2.
    """

    def mask(view: BlockView) -> Bool[Array, " n"]:
        return jnp.any(contribution(view) > view.tolerance, axis=0) | (view.tolerance <= 0)

    return as_selector(mask)


MassBounds = Callable[[BlockView], bounds.Interval]
"""Bounds on the log of each block's attention mass, in nats, for each query head of the group."""


def box_bounds(view: BlockView) -> bounds.Interval:
    """Return the bounds that a page's box alone allows."""
    return bounds.box_mass(view.score, view.num_tokens)


def chord_bounds(view: BlockView) -> bounds.Interval:
    """Return the sharpest bounds that a page's box and mean key allow: chord above, Jensen below."""
    return bounds.log_mass(view.score, view.middle, view.num_tokens)


def coded_bounds(view: BlockView) -> bounds.Interval:
    """Return the bounds that 8-bit copies of the keys allow, nearly the truth, at half the bytes of bfloat16 keys.

    The cache must keep key codes.
    """
    if view.coded is None:
        raise ValueError("coded_bounds: the cache keeps no key codes; set key_codes=True in the Controller")
    return view.coded


def certified(mass_bounds: MassBounds = chord_bounds, slack: float = 1e-3) -> Selector:
    """Blocks that provably hold all but the tolerance of every query head's attention mass.

    Opens blocks by their upper bound U_b until U_D <= eps / (1 - eps) L_S, with U_D the sum over closed
    blocks and L_S that of the lower bounds over opened ones: then the mass left unread is at most
    U_D / (Z_S + U_D) <= eps. Where the bounds are too wide to prove it, everything is opened. `slack`, in
    nats, widens both bounds against rounding. Ties open together; tolerance 0 opens everything. It holds
    for the query and the stored keys of this head and step, and says nothing of the step's output.
    """

    def choose(view: BlockView) -> Selection:
        log = mass_bounds(view)
        # Both are taken over the greatest lower bound: over the greatest upper one, which may be 100 nats above
        # anything provable, they would round to 0, and 0 left against 0 read would pass for a proof.
        least = jnp.max(log.low, axis=-1, keepdims=True)
        least = jnp.where(jnp.isfinite(least), least, 0.0)
        upper, lower = jnp.exp(jnp.minimum(log.high + slack - least, 80.0)), jnp.exp(log.low - slack - least)

        def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
            unread = jnp.sum(jnp.where(opened, 0.0, upper), axis=-1)
            read = jnp.sum(jnp.where(opened, lower, 0.0), axis=-1)
            return (1.0 - view.tolerance) * unread <= view.tolerance * read

        opened = jnp.any(above_threshold(log.high, allowed), axis=0) | (view.tolerance <= 0)
        return Selection(opened=opened, estimate=0.5 * (log.low + log.high), upper=log.high + slack)

    return Selector(choose)
