"""The interface of selectors, which choose the blocks that a query reads, and wrapping of plain functions as one."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control.base import as_value, described, name_of, one_like
from et_jax.control.view import BlockView, Need, likeliest_log_mass, needs_of
from et_jax.types import pytree, static, value


@pytree
class Selection:
    """The blocks to read, and what is known of each block's attention mass: logs, per query head, in nats.

    `upper` is a certain bound, or None; `estimate` is an estimate of the log-sum-exp of q . key over a
    block, or, with `shares`, of the log of its share of the total mass.
    """

    opened: Bool[Array, "*b n"]
    estimate: Float[Array, "*b g n"]
    upper: Float[Array, "*b g n"] | None
    shares: bool = static(default=False)


SUMMARIES: frozenset[Need] = frozenset({"summaries"})
"""What a selector needs by default."""


class Selector:
    """Chooses blocks from a `BlockView`. Derive from it, as a `value` with `choose`, to estimate their masses too.

    Else a function, or a `value` with `__call__`, is enough. The block being written is always read, and blocks without
    tokens never are. `needs` declares what the cache must store for it; `reads_all` promises that every block is
    opened, so that the step skips the summaries. `proves` promises a proof for the view's query, so that no law of
    `refresh` may keep its selection for another.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What the cache must store."""
        return SUMMARIES

    @property
    def reads_all(self) -> bool:
        """Whether every block is opened."""
        return False

    @property
    def proves(self) -> bool:
        """Whether it proves, for the query of its view, what the blocks left unread are worth."""
        return False

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks to read, and the estimates of their masses."""
        raise NotImplementedError

    def __call__(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read: True means read."""
        return self.choose(view).opened


def selection(selector: Selector, view: BlockView) -> Selection:
    """Return what a selector chooses. Raises ValueError, naming it, unless it is a `Selection` of the view's shape."""
    chosen, said = selector.choose(view), f"The selector {name_of(selector)}"
    if not isinstance(chosen, Selection):
        raise ValueError(f"{said} chooses {described(chosen)}; its choose must return a Selection.")
    blocks = view.start.shape
    of_heads = jnp.zeros((*view.query.shape[:-1], *blocks), jnp.float32)
    return Selection(
        opened=one_like(jnp.zeros(blocks, bool), chosen.opened, f"{said} opens"),
        estimate=one_like(of_heads, chosen.estimate, f"{said} estimates"),
        upper=None if chosen.upper is None else one_like(of_heads, chosen.upper, f"{said} bounds"),
        shares=chosen.shares,
    )


Mask = Callable[[BlockView], Bool[Array, " n"]]
AnySelector = Selector | Mask
"""A selector, or a plain function from a view to a mask, True meaning read."""


class Opens(Selector):
    """A selector that opens blocks without estimating their masses."""

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read."""
        raise NotImplementedError

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks to read, and the default estimate of their masses."""
        return Selection(opened=self.opened(view), estimate=likeliest_log_mass(view), upper=None)


@value
class MaskSelector(Opens):
    """Opens the blocks of a mask function or callable value, whose `needs` lists what it reads besides the summaries.

    A plain function declares it with `view.needing`.
    """

    mask: Mask

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", as_value(self.mask))

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the mask, and the summaries."""
        return SUMMARIES | needs_of(getattr(self.mask, "function", self.mask))

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the mask. Raises ValueError if its shape is not that of the blocks."""
        return one_like(
            jnp.zeros(view.start.shape, bool), self.mask(view), f"The selector {name_of(self.mask)} returns"
        )


def as_selector(selector: AnySelector) -> Selector:
    """Return a selector unchanged, or a plain function wrapped as one.

    Raises ValueError for anything else.
    """
    if not callable(selector):
        raise ValueError(f"selector: got {described(selector)}, wanted a selector, a function, or a tuple of them")
    return selector if isinstance(selector, Selector) else MaskSelector(selector)
