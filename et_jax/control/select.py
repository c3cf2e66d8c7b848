"""The selectors, which choose the cache blocks that a query attends to."""

import inspect
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control import bounds
from et_jax.control.base import as_value, name_of, one_like
from et_jax.control.bisect import above_threshold
from et_jax.control.contribution import Contribution, influence
from et_jax.control.head_tolerance import HeadRule
from et_jax.control.selector import SUMMARIES, AnySelector, Opens, Selection, Selector, as_selector
from et_jax.control.view import (
    BlockView,
    Need,
    box_log_mass,
    exact_at_tail,
    greater_mass,
    likeliest_log_mass,
    mass,
    needing,
    needs_of,
    tail,
)
from et_jax.sums import log_softmax, total_where
from et_jax.types import Count, MaybeCount, Number, replace, static, value


@value
class Dense(Opens):
    """Every block."""

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing."""
        return frozenset()

    @property
    def reads_all(self) -> bool:
        """Always."""
        return True

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return all of them."""
        return jnp.ones(view.start.shape, bool)


@value
class SinksWindow(Opens):
    """The blocks of the first `sinks` and of the last `window` tokens (StreamingLLM, Xiao et al. 2023)."""

    sinks: Count = 4
    window: Count = 256

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the sinks and the window."""
        return _ends(view, self.sinks, self.window)


def _ends(view: BlockView, sinks: Count, window: Count) -> Bool[Array, " n"]:
    end = view.start + view.num_tokens
    return (view.start < sinks) | (end > view.length - window)


@value
class Guarded(Selector):
    """The blocks `selector` opens, those of the first `sinks` and last `window` tokens, and `min_blocks` at least.

    The minimum is filled with the blocks of greatest estimated mass (see `view.likeliest_log_mass`), ties together. 0
    turns a guard off. Opening more blocks only adds to the mass read, so a certificate stays valid. The
    defaults are a starting point; three blocks are Quest's minimum. Source: Entropic-Time Inference,
    section 3.3 (minimum active-block budget).
    """

    selector: AnySelector
    sinks: Count = 16
    window: Count = 64
    min_blocks: MaybeCount = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", as_selector(self.selector))
        if isinstance(self.min_blocks, int) and self.min_blocks == 0:
            object.__setattr__(self, "min_blocks", None)  # a disabled guard adds nothing to the program

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the wrapped selector."""
        return self.selector.needs

    @property
    def reads_all(self) -> bool:
        """Whether the wrapped selector opens every block."""
        return self.selector.reads_all

    @property
    def proves(self) -> bool:
        """Whether the wrapped selector does."""
        return self.selector.proves

    def choose(self, view: BlockView) -> Selection:
        """Return what the wrapped selector opens, plus the guarded blocks."""
        chosen = self.selector.choose(view)
        opened = (chosen.opened | _ends(view, self.sinks, self.window)) & (view.num_tokens > 0)
        if self.min_blocks is not None:
            log_mass = chosen.estimate if chosen.shares else likeliest_log_mass(view)
            likely = jnp.max(log_softmax(log_mass), axis=0)
            opened |= _most(jnp.where(opened, jnp.inf, likely), self.min_blocks, view)
        return replace(chosen, opened=opened)


@value
class PerHead(Selector):
    """The wrapped `selector` with a tolerance per query head, set by `rule`.

    For the selectors that use a tolerance: `TopMass`, `ActiveSet`, `Certified` and `ExpectedError`. A
    certificate holds for each head at its own tolerance.
    """

    selector: AnySelector
    rule: HeadRule

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", as_selector(self.selector))
        object.__setattr__(self, "rule", as_value(self.rule))

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the wrapped selector and of the rule."""
        return self.selector.needs | needs_of(getattr(self.rule, "function", self.rule))

    @property
    def reads_all(self) -> bool:
        """Whether the wrapped selector opens every block."""
        return self.selector.reads_all

    @property
    def proves(self) -> bool:
        """Whether the wrapped selector does."""
        return self.selector.proves

    def choose(self, view: BlockView) -> Selection:
        """Return what the wrapped selector opens. Raises ValueError unless the rule returns a tolerance per head."""
        each = one_like(view.head_tolerance, self.rule(view), f"The rule {name_of(self.rule)} returns")
        return self.selector.choose(replace(view, head_tolerance=each))


@value
class Quest(Opens):
    """The `num_blocks` blocks of the greatest upper bound: max over the group of sum_c max(q_c min_c, q_c max_c).

    A fixed budget without a certificate; ignores the tolerance. Ties at the last place are all read.
    Source: Quest (Tang et al. 2024).
    """

    num_blocks: Count

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks of greatest upper bound."""
        return _most(jnp.max(view.score.high, axis=0), self.num_blocks, view)


LogMass = Callable[[BlockView], Float[Array, "g n"]]
"""An estimate of the log of each block's attention mass, in nats up to a constant, for each query head."""


@value
class TopBlocks(Opens):
    """All but the tolerance of the blocks: those with the greatest estimated share of mass for some query head.

    A fixed budget without a certificate, of at least `min_blocks`. `log_mass` estimates masses, by default from boxes
    and mean keys. The least tolerance of the query heads counts. Ties at the last place are all read; tolerance 0 opens
    everything.
    """

    log_mass: LogMass = static(default=box_log_mass)
    min_blocks: Count = 0

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the estimate, and the summaries."""
        return SUMMARIES | needs_of(self.log_mass)

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks of greatest estimated share."""
        blocks = jnp.sum(view.num_tokens > 0, dtype=jnp.int32).astype(jnp.float32)
        count = jnp.ceil((1.0 - jnp.min(view.head_tolerance)) * blocks).astype(jnp.int32)
        score = jnp.max(log_softmax(self.log_mass(view)), axis=0)
        return _most(score, jnp.maximum(count, self.min_blocks), view)


def _most(score: Float[Array, " n"], num_blocks: Count, view: BlockView) -> Bool[Array, " n"]:
    """Return the `num_blocks` valid blocks of greatest score, or all if there are fewer; ties together."""
    valid = view.num_tokens > 0
    score = jnp.where(valid, score, -jnp.inf)[None]
    return above_threshold(score, lambda opened: jnp.sum(opened & valid, axis=-1) >= num_blocks)[0] & valid


@value
class TopMass(Opens):
    """The fewest blocks that leave at most the tolerance of the estimated mass unread, for every query head.

    The estimate replaces a block's keys by their mean, so nothing is certified. The tail is always read
    and counts as read. Ties open together; tolerance 0 opens everything. Source: the top-p of Twilight (Lin
    et al. 2025), over blocks.
    """

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks of greatest estimated mass."""
        return fewest(view, mass(view))


def fewest(view: BlockView, price: Float[Array, "g n"]) -> Bool[Array, " n"]:
    """Return the fewest blocks such that the price of the unread ones is at most the tolerance of every query head.

    `price` is the cost of leaving a block unread, at least 0. The tail is always read, free blocks never. Ties open
    together; tolerance 0 opens everything.
    """
    read = tail(view)

    def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
        return total_where(price, ~(opened | read)) <= view.head_tolerance

    needed = (price > 0) & ~allowed(jnp.zeros_like(price, bool))[:, None]
    opened = jnp.any(above_threshold(price, allowed) & needed, axis=0)
    return opened | read | jnp.any(view.head_tolerance <= 0)


Alpha = Callable[[BlockView], Float[Array, "g n"]]
"""An estimate of the share of attention mass that each query head has in each block."""


@value
class ActiveSet(Selector):
    """The blocks with E_b > theta for some query head, theta = `tolerance`: the active set as printed.

    `contribution` estimates E_b = sum_{i in b} alpha_i s(v_i), and sets
    the unit of theta; `alpha` estimates the share of attention mass: `view.greater_mass` from the last known masses
    and the boxes of the blocks, `view.coded_mass` from 8-bit keys, which it reads, or `view.mass` from mean keys,
    which loses answers. theta 0 opens everything, and so does every `look_every`-th token, which renews the last known
    masses. Source: Entropic-Time Inference, section 3.2.
    """

    contribution: Contribution = static(default=influence)
    alpha: Alpha = static(default=greater_mass)
    look_every: MaybeCount = None

    def __post_init__(self) -> None:
        for name, wanted in (("contribution", ("a view", "the share of mass in each block")), ("alpha", ("a view",))):
            try:
                inspect.signature(getattr(self, name)).bind(*wanted)
            except (TypeError, ValueError):
                raise ValueError(f"ActiveSet: {name} must be a function of {' and '.join(wanted)}") from None
        if isinstance(self.look_every, int) and self.look_every < 1:
            raise ValueError(f"ActiveSet: look_every is {self.look_every}; it must be at least 1, or None for never")

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the contribution and of alpha, and the summaries."""
        return SUMMARIES | needs_of(self.contribution) | needs_of(self.alpha)

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks above the threshold, and an estimate of masses: alpha, or from codes if there are any."""
        tolerance, share = view.head_tolerance, self.alpha(view)
        opened = jnp.any(self.contribution(view, share) > tolerance[:, None], axis=0) | jnp.any(tolerance <= 0)
        if self.look_every is not None:
            opened |= view.length % self.look_every == 0
        if "masses" not in needs_of(self.alpha):
            return Selection(opened=opened, estimate=likeliest_log_mass(view), upper=None)
        assert view.last_mass is not None
        log_share = jnp.log(jnp.maximum(view.last_mass, jnp.finfo(jnp.float32).tiny))
        return Selection(opened=opened, estimate=log_share, upper=None, shares=True)


MassBounds = Callable[[BlockView], bounds.Interval]
"""Bounds on the log of each block's attention mass, in nats, for each query head of the group."""


def box_bounds(view: BlockView) -> bounds.Interval:
    """Return the bounds from a page's box alone."""
    return bounds.box_mass(view.score, view.num_tokens)


def chord_bounds(view: BlockView) -> bounds.Interval:
    """Return the tightest bounds from a page's box and mean key: chord above, Jensen below."""
    if view.mean_score is None:
        return bounds.chord_mass(view.score, view.middle, view.num_tokens)
    low, high = (
        bounds.chord_mass(view.score, mean, view.num_tokens) for mean in (view.mean_score.low, view.mean_score.high)
    )
    return bounds.Interval(low=low.low, high=high.high)


@needing("codes")
def coded_bounds(view: BlockView) -> bounds.Interval:
    """Return the bounds from 8-bit copies of the keys, nearly exact, at half the bytes of bfloat16 keys."""
    if view.coded is None:
        raise ValueError(
            "coded_bounds: no key codes in this view; a selector that reads them declares it by `needing`."
        )
    return view.coded


@value
class Certified(Selector):
    """Blocks that provably have all but the tolerance of every query head's attention mass.

    Opens blocks by their upper bound U_b until U_D <= eps / (1 - eps) L_S, with U_D the sum over closed
    blocks and L_S that of the lower bounds over opened ones: then the unread mass is at most
    U_D / (Z_S + U_D) <= eps. If the bounds are too wide to prove it, everything is opened. `slack`, in
    nats, widens both bounds against rounding. The tail is always read, so it counts in L_S, at its own
    mass. Ties open together; tolerance 0 opens everything. It holds for the query and the stored keys of this
    head and step, each head at its own tolerance, and not for the step's output.
    """

    mass_bounds: MassBounds = static(default=chord_bounds)
    slack: Number = 1e-3

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the bounds, and the summaries."""
        return SUMMARIES | needs_of(self.mass_bounds)

    @property
    def proves(self) -> bool:
        """Always."""
        return True

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks of the proof, and the bounds that it uses."""
        log, slack, eps, ends = self.mass_bounds(view), self.slack, view.head_tolerance, tail(view)
        log = bounds.Interval(low=exact_at_tail(view, log.low), high=exact_at_tail(view, log.high))
        # Both are scaled by the greatest lower bound: scaled by the greatest upper one, which may be 100 nats
        # greater, they would round to 0, and 0 unread against 0 read would pass for a proof.
        least = jnp.max(log.low, axis=-1, keepdims=True)
        least = jnp.where(jnp.isfinite(least), least, 0.0)
        upper, lower = jnp.exp(jnp.minimum(log.high + slack - least, 80.0)), jnp.exp(log.low - slack - least)

        def allowed(opened: Bool[Array, "g n"]) -> Bool[Array, " g"]:
            unread, read = total_where(upper, ~(opened | ends)), total_where(lower, opened | ends)
            return (1.0 - eps) * unread <= eps * read

        opened = jnp.any(above_threshold(log.high, allowed), axis=0) | ends | jnp.any(eps <= 0)
        return Selection(opened=opened, estimate=0.5 * (log.low + log.high), upper=log.high + slack)
