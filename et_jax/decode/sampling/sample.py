"""From logits to a token: temperature, truncation, one sampled token, and what is observed on the way."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.base import ControlState, Signals, TemperatureRule, name_of, one_like
from et_jax.decode.rows import Rows
from et_jax.decode.sampling import settings as sampling
from et_jax.decode.sampling.settings import Sampling
from et_jax.decode.sampling.steering import may_draw, recent_tokens, steer
from et_jax.decode.sampling.truncation import Truncated, truncate
from et_jax.decode.state import DecodeState
from et_jax.types import pytree, replace


@pytree
class Sampled:
    """A token per row, the temperature it was drawn at, and the signals with those of sampling filled in.

    `moments` are those of the logits it was drawn from, after penalties and at that temperature.
    """

    token: Int[Array, " r"]
    temperature: Float[Array, " r"]
    signals: Signals
    moments: entropy.Moments


@jax.named_scope("sample")
def sample(
    state: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    signals: Signals,
    raw: entropy.Moments,
) -> Sampled:
    """Penalise, set the temperature, truncate, sample; measure what was sampled.

    `raw` are the moments of the model's own `logits`. Passes over the vocabulary are skipped where no row needs
    them; a row that needs none has the same bits whether its neighbours do or not.
    """
    settings, control = rows.take(state.sampling), rows.take(state.control)
    penalised = _altered(state, rows, settings)
    altered = _alter(state, rows, logits, settings, penalised)
    heat = _heat(rows.take(state.laws).temperature_rule, altered, settings, signals, control)
    normaliser = entropy.log_normaliser(raw)
    left = truncate(altered, heat, settings, normaliser - control.surprisal_cap, logits)
    token = sampling.sample_token(left.logits, heat, left.cut, settings.key, rows.position + 1)
    warm = _tempered(altered, heat, penalised, raw)
    kept = _truncated_entropy(left, heat, settings, entropy.entropy(warm))
    logit = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    cold = heat == 0
    signals = replace(
        signals,
        tempered_entropy=jnp.where(cold, 0.0, entropy.entropy(warm)),
        tempered_varentropy=jnp.where(cold, 0.0, entropy.varentropy(warm)),
        truncated_entropy=jnp.where(cold, 0.0, kept),
        surprisal=normaliser - logit,
    )
    return Sampled(token=token, temperature=heat, signals=signals, moments=warm)


def guess(state: DecodeState, rows: Rows, logits: Float[Array, "r v"], position: Int[Array, " r"]) -> Int[Array, " r"]:
    """Return what the small model would say at `position`, drawn as its request has the model draw.

    The temperature is the last one decided: a rule that probes the token itself is asked of the model alone.
    """
    settings = rows.take(state.sampling)
    altered = _alter(state, rows, logits, settings, _altered(state, rows, settings))
    heat = jnp.where(settings.temperature == 0, 0.0, rows.take(state.control.temperature))
    left = truncate(altered, heat, settings, jnp.full_like(heat, -jnp.inf), logits)
    return sampling.sample_token(left.logits, heat, left.cut, settings.key, position)


def _altered(state: DecodeState, rows: Rows, settings: Sampling) -> Bool[Array, " r"]:
    """Which rows have logits that are not the model's own: by penalties, or by steering."""
    steered = rows.take(state.steering.on) if state.steering is not None else False
    return rows.run & (sampling.penalises(settings) | steered)


def _alter(
    state: DecodeState, rows: Rows, logits: Float[Array, "r v"], settings: Sampling, altered: Bool[Array, " r"]
) -> Float[Array, "r v"]:
    """The logits after penalties and steering; both are worked out only where a row asks for one of them."""
    counts, steering = state.counts, state.steering
    if counts is None or steering is None:
        return logits

    def alter() -> Float[Array, "r v"]:
        own = rows.take(steering)
        slot = jnp.arange(len(state.text)) if rows.slot is None else rows.slot
        recent = recent_tokens(state.text, slot, rows.position)
        penalised = sampling.penalise(logits, settings, rows.take(counts))
        may = may_draw(own, rows.take(state.allowance), logits.shape[-1])
        steered = steer(penalised, own, rows.take(state.stop_ids), rows.take(state.generated), recent, may)
        return jnp.where(own.on[:, None], steered, penalised)

    return jax.lax.cond(jnp.any(altered), alter, lambda: logits)


def constrained_entropy(
    state: DecodeState, rows: Rows, logits: Float[Array, "r v"], temperature: float, whole: Float[Array, " r"]
) -> Float[Array, " r"]:
    """Return the entropy of the tokens that grammar and allowed tokens leave, at a temperature, in nats.

    It is `whole`, that of all tokens, where a row is not steered.
    """
    if state.steering is None:
        return whole
    steering = rows.take(state.steering)

    def measure() -> Float[Array, " r"]:
        may = may_draw(steering, rows.take(state.allowance), logits.shape[-1])
        left = entropy.entropy(entropy.moments(jnp.where(may, logits, -jnp.inf), temperature))
        return jnp.where(steering.on, left, whole)

    return jax.lax.cond(jnp.any(rows.run & steering.on), measure, lambda: whole)


def _heat(
    rule: TemperatureRule | None,
    logits: Float[Array, "r v"],
    settings: Sampling,
    signals: Signals,
    control: ControlState,
) -> Float[Array, " r"]:
    """The temperature of every row: that of the laws or of the temperature rule, 0 where the request is greedy."""
    heat = control.temperature
    if rule is not None:

        def decide(
            rule: TemperatureRule, row: Float[Array, " v"], signals: Signals, control: ControlState
        ) -> Float[Array, ""]:
            def moments_at(temperature: Float[Array, ""] | float) -> tuple[Float[Array, ""], Float[Array, ""]]:
                m = entropy.moments(row, temperature)
                return entropy.entropy(m), entropy.varentropy(m)

            decided = rule(moments_at, signals, control)
            return one_like(control.temperature, decided, f"The temperature rule {name_of(rule)} returns")

        heat = jax.vmap(decide)(rule, logits, signals, control)
    return jnp.where(settings.temperature == 0, 0.0, heat)


def _tempered(
    logits: Float[Array, "r v"], temperature: Float[Array, " r"], penalised: Bool[Array, " r"], raw: entropy.Moments
) -> entropy.Moments:
    """The moments at each row's temperature, 1 where it is greedy; `raw` where it says that already."""
    warm = jnp.where(temperature > 0, temperature, 1.0)
    known = (warm == 1.0) & ~penalised

    def measure() -> entropy.Moments:
        measured = entropy.moments(logits, warm)
        return jax.tree.map(lambda old, new: jnp.where(known, old, new), raw, measured)

    return jax.lax.cond(jnp.all(known), lambda: raw, measure)


def _truncated_entropy(
    truncated: Truncated, temperature: Float[Array, " r"], settings: Sampling, whole: Float[Array, " r"]
) -> Float[Array, " r"]:
    """Entropy after truncation, in nats; `whole`, the entropy before it, where a row is not cut."""
    is_cut = (truncated.cut > -jnp.inf) | (settings.typical_p < 1)

    def measure() -> Float[Array, " r"]:
        kept = jnp.where(truncated.logits >= truncated.cut[:, None], truncated.logits, -jnp.inf)
        left = entropy.entropy(entropy.moments(kept, jnp.where(temperature > 0, temperature, 1.0)))
        return jnp.where(is_cut, left, whole)

    return jax.lax.cond(jnp.any(is_cut), measure, lambda: whole)
