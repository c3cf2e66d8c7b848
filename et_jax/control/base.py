"""What a law may see, what it may decide, and how laws are put together.

A law is one small pure function of one sequence. It sees plain arrays and never a neighbour, so the
same seed gives the same text whoever shares the batch:

    def my_law(signals: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=0.5 + 0.1 * signals.entropy)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.types import pytree


@pytree
class Signals:
    """What a step observed of a sequence, and what a law may know of it. Laws only read it.

    Entropies are in nats, varentropies in nats^2. `entropy`, `varentropy`, `margin` and `surprisal` are
    raw: of the model's own distribution, before penalties and temperature; the first two at the
    calibrated temperature where the model has one. `margin` is how far the likeliest logit stands above
    the next, in nats. `tempered_*` is after temperature, before truncation; `truncated_entropy` after
    both. `entropy_low` and `entropy_high` bracket the raw entropy and are equal when it is exact.
    `kept_mass` is the share of attention mass on the blocks read, the least over layers and query heads:
    certain under a certified selector, else an estimate that may be too high. `blocks_read` counts
    blocks over layers and KV heads, `summaries_read` those looked at to choose. `cost` is in bytes, and
    nominal: this sequence's own cache reads and the share of the weights that it would have were every row
    of the step served; what a text is charged (`TokenTrace.cost`) depends on the company. `length` counts
    tokens in the cache, `generated` those produced, `remaining` those still allowed; `arrival` orders
    requests; `urgency` is the caller's.
    """

    entropy: Float[Array, "*b"]
    varentropy: Float[Array, "*b"]
    entropy_low: Float[Array, "*b"]
    entropy_high: Float[Array, "*b"]
    margin: Float[Array, "*b"]
    tempered_entropy: Float[Array, "*b"]
    tempered_varentropy: Float[Array, "*b"]
    truncated_entropy: Float[Array, "*b"]
    surprisal: Float[Array, "*b"]
    kept_mass: Float[Array, "*b"]
    blocks_read: Int[Array, "*b"]
    summaries_read: Int[Array, "*b"]
    cost: Float[Array, "*b"]
    length: Int[Array, "*b"]
    generated: Int[Array, "*b"]
    remaining: Int[Array, "*b"]
    arrival: Int[Array, "*b"]
    pages_held: Int[Array, "*b"]
    urgency: Float[Array, "*b"]


@pytree
class ControlState:
    """What the laws have decided for a sequence.

    `entropy` is filtered, in nats; `entropic_time` in nats; `total_cost` in bytes, nominal; `surprisal_cap`
    in nats (inf = off); `tolerance` is the attention mass that may be left unread; `wait` counts steps
    since the last token. `block_mask` packs, 32 to a word, the blocks each layer and KV head read last
    (see `unpack_blocks`). `notes` holds what a law keeps for itself under its own name.

    A temperature must be finite and at least 0, the entropic time finite, the other numbers not NaN: a law
    that breaks this ends its sequence with an error that names the field.
    """

    entropy: Float[Array, "*b"]
    entropic_time: Float[Array, "*b"]
    total_cost: Float[Array, "*b"]
    temperature: Float[Array, "*b"]
    surprisal_cap: Float[Array, "*b"]
    tolerance: Float[Array, "*b"]
    priority: Float[Array, "*b"]
    wait: Int[Array, "*b"]
    block_mask: UInt32[Array, "*b l k n32"]
    notes: dict[str, Any]


def unpack_blocks(block_mask: UInt32[Array, "*b n32"]) -> Bool[Array, "*b n"]:
    """Return the mask of blocks that `pack_blocks` packed; its length is a multiple of 32."""
    bits = (block_mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*block_mask.shape[:-1], -1).astype(bool)


def pack_blocks(mask: Bool[Array, "*b n"]) -> UInt32[Array, "*b n32"]:
    """Return `mask` packed 32 blocks to a word, block 0 in the lowest bit; the last word is zero-padded."""
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    words = padded.reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def num_words(num_blocks: int) -> int:
    """Return the 32-bit words that hold one bit per block."""
    return -(-num_blocks // 32)


def _unchanged(state: ControlState) -> ControlState:
    return state


@dataclasses.dataclass(frozen=True)
class Law:
    """A rule run after every token: `update` sets the next step, `init` the starting values of a sequence.

    Both change only the fields they are named for. Any plain function `(Signals, ControlState) ->
    ControlState` serves where a law is wanted; it is a law with nothing to start.
    """

    update: Callable[[Signals, ControlState], ControlState]
    init: Callable[[ControlState], ControlState] = _unchanged

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Return the state after one token."""
        return self.update(signals, state)


AnyLaw = Law | Callable[[Signals, ControlState], ControlState]


def chain(*laws: AnyLaw) -> Law:
    """Return the law that runs `laws` in order, each seeing what those before it decided."""
    members = tuple(law if isinstance(law, Law) else Law(law) for law in laws)

    def init(state: ControlState) -> ControlState:
        for law in members:
            state = law.init(state)
        return state

    def update(signals: Signals, state: ControlState) -> ControlState:
        for law in members:
            state = law.update(signals, state)
        return state

    return Law(update, init)


Moments = Callable[[Float[Array, ""] | float], tuple[Float[Array, ""], Float[Array, ""]]]
"""Entropy (nats) and varentropy (nats^2) of this very step's distribution at a given temperature."""

TemperatureRule = Callable[[Moments, Signals, ControlState], Float[Array, ""]]
"""The temperature for this very token, decided before it is drawn; may probe other temperatures."""

PriorityRule = Callable[[Signals, ControlState], Float[Array, ""]]
"""How soon a sequence should be served, higher first; `priority.aged` keeps a rule from starving anybody."""
