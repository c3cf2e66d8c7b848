"""From logits to a token: temperature, truncation, sampling, and the signals measured on the way."""

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
    """A token per row, its temperature, and the signals with those of sampling filled in.

    `moments` are those of the logits after penalties, at that temperature.
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
    """Apply penalties, temperature and truncation, sample a token, and measure the signals.

    `raw` are the moments of the model's own `logits`. Passes over the vocabulary are skipped if no row requires them. A
    row that requires none has the same bits whether other rows do or not.
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
    """Return the small model's token at `position`, sampled with the request's settings.

    The temperature is the last one decided; a temperature rule that probes the logits runs only for the large model.
    """
    settings = rows.take(state.sampling)
    altered = _alter(state, rows, logits, settings, _altered(state, rows, settings))
    heat = jnp.where(settings.temperature == 0, 0.0, rows.take(state.control.temperature))
    left = truncate(altered, heat, settings, jnp.full_like(heat, -jnp.inf), logits)
    return sampling.sample_token(left.logits, heat, left.cut, settings.key, position)


def _altered(state: DecodeState, rows: Rows, settings: Sampling) -> Bool[Array, " r"]:
    """Return which rows have penalties or steering, so that their logits differ from the model's own."""
    steered = rows.take(state.steering.on) if state.steering is not None else False
    return rows.run & (sampling.penalises(settings) | steered)


def _alter(
    state: DecodeState, rows: Rows, logits: Float[Array, "r v"], settings: Sampling, altered: Bool[Array, " r"]
) -> Float[Array, "r v"]:
    """Return the logits after penalties and steering, which are computed only if a row uses them."""
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
    """Return the entropy over the tokens that grammar and allowed tokens permit, at a temperature, in nats.

    For a row without steering it is `whole`, the entropy over all tokens.
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
    """Return the temperature of every row: that of the laws or of the temperature rule, 0 for greedy requests."""
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
    """Return the moments at each row's temperature, 1 for greedy rows; `raw` if they are the same."""
    warm = jnp.where(temperature > 0, temperature, 1.0)
    known = (warm == 1.0) & ~penalised

    def measure() -> entropy.Moments:
        measured = entropy.moments(logits, warm)
        return jax.tree.map(lambda old, new: jnp.where(known, old, new), raw, measured)

    return jax.lax.cond(jnp.all(known), lambda: raw, measure)


def _truncated_entropy(
    truncated: Truncated, temperature: Float[Array, " r"], settings: Sampling, whole: Float[Array, " r"]
) -> Float[Array, " r"]:
    """Return the entropy after truncation, in nats; for rows without truncation `whole`, the entropy before it."""
    is_cut = (truncated.cut > -jnp.inf) | (settings.typical_p < 1)

    def measure() -> Float[Array, " r"]:
        kept = jnp.where(truncated.logits >= truncated.cut[:, None], truncated.logits, -jnp.inf)
        left = entropy.entropy(entropy.moments(kept, jnp.where(temperature > 0, temperature, 1.0)))
        return jnp.where(is_cut, left, whole)

    return jax.lax.cond(jnp.any(is_cut), measure, lambda: whole)
