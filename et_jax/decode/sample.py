"""From logits to a token: temperature, truncation, one sampled token, and what is observed on the way."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.base import ControlState, Signals, TemperatureRule, name_of, one_like
from et_jax.decode import sampling
from et_jax.decode.sampling import Sampling
from et_jax.types import pytree, replace


@pytree
class Sampled:
    """A token per row, the temperature it was drawn at, and the signals with those of sampling filled in."""

    token: Int[Array, " r"]
    temperature: Float[Array, " r"]
    signals: Signals


def sample(
    rule: TemperatureRule | None,
    logits: Float[Array, "r v"],
    settings: Sampling,
    penalised: Bool[Array, " r"],
    signals: Signals,
    control: ControlState,
    position: Int[Array, " r"],
    raw: entropy.Moments,
) -> Sampled:
    """Set the temperature, truncate, sample.

    `raw` are the moments of the model's own logits, from which `logits` differ in rows that are
    `penalised`. Passes over the vocabulary are skipped where no row needs them; a row that needs none
    has the same bits whether its neighbours do or not.
    """
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
    greedy = settings.temperature == 0
    heat = jnp.where(greedy, 0.0, heat)
    cut = sampling.threshold(logits, heat, settings, entropy.log_normaliser(raw) - control.surprisal_cap)
    token = sampling.sample_token(logits, heat, cut, sampling.uniform(settings, position))
    warm = _tempered(logits, heat, penalised, raw)
    kept = _truncated_entropy(logits, heat, cut, entropy.entropy(warm))
    cold = heat == 0
    signals = replace(
        signals,
        tempered_entropy=jnp.where(cold, 0.0, entropy.entropy(warm)),
        tempered_varentropy=jnp.where(cold, 0.0, entropy.varentropy(warm)),
        truncated_entropy=jnp.where(cold, 0.0, kept),
    )
    return Sampled(token=token, temperature=heat, signals=signals)


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
    logits: Float[Array, "r v"], temperature: Float[Array, " r"], cut: Float[Array, " r"], whole: Float[Array, " r"]
) -> Float[Array, " r"]:
    """Entropy after truncation, in nats; `whole`, the entropy before it, where a row is not cut."""
    is_cut = cut > -jnp.inf

    def measure() -> Float[Array, " r"]:
        kept = jnp.where(logits >= cut[:, None], logits, -jnp.inf)
        left = entropy.entropy(entropy.moments(kept, jnp.where(temperature > 0, temperature, 1.0)))
        return jnp.where(is_cut, left, whole)

    return jax.lax.cond(jnp.any(is_cut), measure, lambda: whole)
