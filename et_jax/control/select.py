"""Which blocks of the cache a query reads."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
