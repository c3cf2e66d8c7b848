"""Which of two models produces the next token, by the entropy of their predictions (Simonds 2025).

In Entropy Adaptive Decoding the small model is active while it is certain, else the large one. Entropies are in nats,
at temperature 1; the paper uses bits: its 0.25 bits are 0.173 nats.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.types import Count, Number, pytree, replace, static, value

MODEL, SMALL = 0, 1


@pytree
class SwitchState:
    """The active model of a sequence, `MODEL` or `SMALL`, and the state of the switch.

    `window` has the latest entropies of the active model, newest first, NaN where there were none; `since` counts the
    tokens since the active model changed.
    """

    speaker: Int[Array, "*b"]
    window: Float[Array, "*b w"]
    since: Int[Array, "*b"]


class Switch:
    """Chooses the active model. Derive from it, as a `value`; both methods concern one sequence."""

    def started(self) -> SwitchState:
        """Return the state before the first token."""
        raise NotImplementedError

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state before sampling, given the entropy; if the model changes, it predicts the token again."""
        return state

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state after a token that was sampled from a prediction of this entropy."""
        raise NotImplementedError


@value
class AsPrinted(Switch):
    """The switch as printed in the paper.

    After each token the mean of the last `window` entropies, of either model, is compared with `tau`: above it the
    large model becomes active, else the small one. The large model produces at least `least` tokens before the small
    one may become active. The token whose entropy exceeds tau is still the small model's.
    """

    tau: Number
    window: int = static(default=5)
    least: Count = 10

    def started(self) -> SwitchState:
        """Return the small model as active."""
        return _begun(self.window, since=0)

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state after a token."""
        recorded = replace(state, window=_window_with(state, entropy), since=state.since + 1)
        mean = jnp.nanmean(recorded.window)
        wanted = jnp.where(mean > self.tau, MODEL, SMALL)
        turns = (recorded.since >= self.least) & (wanted != state.speaker)
        return replace(
            recorded, speaker=jnp.where(turns, wanted, state.speaker), since=jnp.where(turns, 0, recorded.since)
        )


@value
class Hysteresis(Switch):
    """A switch that averages entropies of one model only, and lets the large model produce the uncertain token itself.

    The small model hands over before a token is sampled if the mean of its last `window` entropies exceeds `tau`; the
    large model hands back once the mean of its own is at most `low` times tau. A change empties the window. A model
    produces `least` tokens before it may change, except the first.
    """

    tau: Number
    low: Number = 0.7
    window: int = static(default=5)
    least: Count = 10

    def started(self) -> SwitchState:
        """Return the small model as active, which may hand over at once."""
        return _begun(self.window, since=self.least)

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Hand over if the small model has become uncertain."""
        doubts = jnp.nanmean(_window_with(state, entropy)) > self.tau
        return _turned(state, (state.speaker == SMALL) & (state.since >= self.least) & doubts)

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Hand back if the large model has become certain."""
        recorded = replace(state, window=_window_with(state, entropy), since=state.since + 1)
        certain = jnp.nanmean(recorded.window) <= self.low * self.tau
        return _turned(recorded, (state.speaker == MODEL) & (recorded.since >= self.least) & certain)


def _begun(window: int, since: Count) -> SwitchState:
    return SwitchState(
        speaker=jnp.asarray(SMALL, jnp.int32),
        window=jnp.full(window, jnp.nan, jnp.float32),
        since=jnp.asarray(since, jnp.int32),
    )


def _window_with(state: SwitchState, entropy: Float[Array, ""]) -> Float[Array, " w"]:
    return jnp.concatenate([entropy[None], state.window[:-1]])


def _turned(state: SwitchState, turns: Array) -> SwitchState:
    """Return the state with the other model active and an empty window, if it turns."""
    return SwitchState(
        speaker=jnp.where(turns, 1 - state.speaker, state.speaker),
        window=jnp.where(turns, jnp.nan, state.window),
        since=jnp.where(turns, 0, state.since),
    )
