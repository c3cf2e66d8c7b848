"""What chooses the blocks of the cache that a query reads, what it answers, and which functions may stand for one."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control.base import as_value, described, name_of, one_like
from et_jax.control.view import BlockView, Need, likeliest_log_mass, needs_of
from et_jax.types import pytree, static, value


@pytree
class Selection:
    """The blocks to read, and what is thought of each block's attention mass: logs, per query head, in nats.

    `upper` is certain, and None where the selector knows no bound; `estimate` is a guess: at e^(q . key) summed over a
    block, or, where it is of `shares`, at its share of all the mass.
    """

    opened: Bool[Array, "*b n"]
    estimate: Float[Array, "*b g n"]
    upper: Float[Array, "*b g n"] | None
    shares: bool = static(default=False)


SUMMARIES: frozenset[Need] = frozenset({"summaries"})
"""What a selector needs that does not say otherwise."""


class Selector:
    """Chooses blocks from a `BlockView`. Derive from it, as a `value`, for a selector with numbers.

    The block being written is read whatever a selector says, and blocks a sequence does not hold never
    are. `needs` says what the cache must keep for it; `reads_all` promises that every block is opened,
    which lets the step skip the summaries.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What the cache must keep."""
        return SUMMARIES

    @property
    def reads_all(self) -> bool:
        """Whether every block is opened."""
        return False

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks to read, and what is thought of their masses."""
        raise NotImplementedError

    def __call__(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read: True means read."""
        return self.choose(view).opened


def selection(selector: Selector, view: BlockView) -> Selection:
    """Return what a selector chooses. Raises ValueError, naming it, where that is no `Selection` of the view's form."""
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
"""A plain function from a view to a mask, True meaning read, serves where a selector is wanted."""


class Opens(Selector):
    """A selector that knows which blocks to open and nothing of their masses."""

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the blocks to read."""
        raise NotImplementedError

    def choose(self, view: BlockView) -> Selection:
        """Return the blocks to read, and the best guess at their masses."""
        return Selection(opened=self.opened(view), estimate=likeliest_log_mass(view), upper=None)


@value
class MaskSelector(Opens):
    """Opens what a function or a value with numbers answers, which says by `needs` what it reads besides the summaries.

    For a plain function that is `view.needing`.
    """

    mask: Mask

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", as_value(self.mask))

    @property
    def needs(self) -> frozenset[Need]:
        """What the mask needs, and the summaries."""
        return SUMMARIES | needs_of(getattr(self.mask, "function", self.mask))

    def opened(self, view: BlockView) -> Bool[Array, " n"]:
        """Return the mask. Raises ValueError where it is none over the blocks."""
        return one_like(
            jnp.zeros(view.start.shape, bool), self.mask(view), f"The selector {name_of(self.mask)} returns"
        )


def as_selector(selector: AnySelector) -> Selector:
    """Return a selector as it is, or the one that opens what a plain function answers.

    Raises ValueError for anything else.
    """
    if not callable(selector):
        raise ValueError(f"selector: got {described(selector)}, wanted a selector, a function, or a tuple of them")
    return selector if isinstance(selector, Selector) else MaskSelector(selector)
