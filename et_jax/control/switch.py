"""Which of two models speaks next, by the entropy of their predictions: Entropy Adaptive Decoding (Simonds 2025).

A small model speaks while it is certain, the model itself where the small one is not. Entropies are in nats here, at
temperature 1, where the paper counts bits: its 0.25 bits are 0.173 nats.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.types import Count, Number, pytree, replace, static, value

MODEL, SMALL = 0, 1


@pytree
class SwitchState:
    """Who speaks in a sequence, `MODEL` or `SMALL`, and what the switch remembers.

    `window` are the latest entropies of the active model, newest first, NaN where there were none; `since` counts the
    tokens since the speaker changed.
    """

    speaker: Int[Array, "*b"]
    window: Float[Array, "*b w"]
    since: Int[Array, "*b"]


class Switch:
    """Decides who speaks. Derive from it, as a `value`; both decisions concern one sequence."""

    def started(self) -> SwitchState:
        """Return the state before the first token."""
        raise NotImplementedError

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state when the entropy is known and nothing sampled: a new speaker predicts the token anew."""
        return state

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state after a token, sampled from a prediction of this entropy."""
        raise NotImplementedError


@value
class AsPrinted(Switch):
    """The switch as the paper prints it.

    After each token the mean of the last `window` entropies, of whichever model, is compared with `tau`: above it the
    model is active, up to it the small one. The active model writes at least `least` tokens before the other may become
    active. The token whose entropy passes tau is the small model's all the same.
    """

    tau: Number
    window: int = static(default=5)
    least: Count = 10

    def started(self) -> SwitchState:
        """Return the small model as the speaker."""
        return _begun(self.window, since=0)

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state after a token."""
        noted = replace(state, window=_noted(state, entropy), since=state.since + 1)
        mean = jnp.nanmean(noted.window)
        wanted = jnp.where(mean > self.tau, MODEL, SMALL)
        turns = (noted.since >= self.least) & (wanted != state.speaker)
        return replace(noted, speaker=jnp.where(turns, wanted, state.speaker), since=jnp.where(turns, 0, noted.since))


@value
class Hysteresis(Switch):
    """A switch that mixes no entropies of two models, and lets the model say the very token that the small one doubts.

    The small model hands over before it says a token, where the mean of its last `window` entropies passes `tau`; the
    model hands back once the mean of its own is at most `low` times tau. A change empties the window. A speaker says
    `least` tokens before it may change, but for the first.
    """

    tau: Number
    low: Number = 0.7
    window: int = static(default=5)
    least: Count = 10

    def started(self) -> SwitchState:
        """Return the small model as the speaker, which may hand over at once."""
        return _begun(self.window, since=self.least)

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Hand over where the small model has become uncertain."""
        doubts = jnp.nanmean(_noted(state, entropy)) > self.tau
        return _turned(state, (state.speaker == SMALL) & (state.since >= self.least) & doubts)

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Hand back where the model has become certain."""
        noted = replace(state, window=_noted(state, entropy), since=state.since + 1)
        certain = jnp.nanmean(noted.window) <= self.low * self.tau
        return _turned(noted, (state.speaker == MODEL) & (noted.since >= self.least) & certain)


def _begun(window: int, since: Count) -> SwitchState:
    return SwitchState(
        speaker=jnp.asarray(SMALL, jnp.int32),
        window=jnp.full(window, jnp.nan, jnp.float32),
        since=jnp.asarray(since, jnp.int32),
    )


def _noted(state: SwitchState, entropy: Float[Array, ""]) -> Float[Array, " w"]:
    return jnp.concatenate([entropy[None], state.window[:-1]])


def _turned(state: SwitchState, turns: Array) -> SwitchState:
    """The state with the other speaker and an empty window, where it turns."""
    return SwitchState(
        speaker=jnp.where(turns, 1 - state.speaker, state.speaker),
        window=jnp.where(turns, jnp.nan, state.window),
        since=jnp.where(turns, 0, state.since),
    )
