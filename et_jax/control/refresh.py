"""When a sequence selects its cache blocks anew. Between two selections it reads the blocks of the last one again.

A token that selects nothing inspects no summary of a block. It reads the blocks of the last selection, and the one that
it is written to. Without one of these laws every token selects.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.base import ControlState, Law, Signals, claim, with_record
from et_jax.types import Count, Number, pytree, replace, value

_RECORD = "refresh"


@value
class Every(Law):
    """Select at every `num_tokens`-th token."""

    num_tokens: Count = 16

    sets = frozenset({"refresh"})

    def __post_init__(self) -> None:
        if isinstance(self.num_tokens, int) and self.num_tokens < 1:
            raise ValueError(f"Every: num_tokens is {self.num_tokens}; it must be at least 1")

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set whether the next token selects."""
        return replace(state, refresh=signals.generated % self.num_tokens == 0)


@pytree
class RefreshRecord:
    """Entropic time in nats, and the tokens generated, when blocks were last selected."""

    entropic_time: Float[Array, "*b"]
    generated: Int[Array, "*b"]


@value
class EntropicTime(Law):
    """Select when entropic time has advanced by `step` nats since the last selection, or after `most_tokens`.

    It must follow the clock in the chain.
    """

    step: Number
    most_tokens: Count = 64

    sets = frozenset({"refresh"})

    def __post_init__(self) -> None:
        if isinstance(self.step, float) and self.step <= 0:
            raise ValueError(f"EntropicTime: step is {self.step:g}; it must be above 0 nats")
        if isinstance(self.most_tokens, int) and self.most_tokens < 1:
            raise ValueError(f"EntropicTime: most_tokens is {self.most_tokens}; it must be at least 1")

    def init(self, state: ControlState) -> ControlState:
        """Record that the first token selects."""
        record = RefreshRecord(entropic_time=state.entropic_time, generated=jnp.zeros_like(state.wait))
        return claim(self, state, _RECORD, record)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set whether the next token selects."""
        last = state.records[_RECORD]
        advanced = state.entropic_time - last.entropic_time >= self.step
        again = advanced | (signals.generated - last.generated >= self.most_tokens)
        now = RefreshRecord(
            entropic_time=jnp.where(again, state.entropic_time, last.entropic_time),
            generated=jnp.where(again, signals.generated, last.generated),
        )
        return with_record(replace(state, refresh=again), _RECORD, now)
