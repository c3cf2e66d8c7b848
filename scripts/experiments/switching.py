"""Does entropy choose better than a coin which words a small model may say?

Two models with one tokenizer take turns (Simonds 2025), as printed and with the guards of `switch.Hysteresis`. "random"
tosses a coin every ten tokens, with the share of words that the model has as printed. On texts at temperature 0.7,
quality is the share of tokens which the model itself would have said there (its race has the same noise), and the mean
log-probability it gives them. What it takes is bytes of weights and caches of decoding.
"""

import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control.controller import Controller
from et_jax.control.switch import MODEL, SMALL, AsPrinted, Hysteresis, Switch, SwitchState
from et_jax.decode.sampling.settings import fold_key, plain, sample_token
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.tasks.calibration import held_out_logits
from et_jax.types import Number, replace, value
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, setting

TEMPERATURE = 0.7
RUN = 10  # tokens between two coins, the paper's least run


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model(quick="bundled")
    small: str = experiment.model("bundled-small")
    text: Path = experiment.text()
    prompts: int = setting(40, "prompts of the text", least=2, quick=2)
    tokens: int = setting(128, "tokens of a prompt, and of a continuation", least=2, quick=16)
    bits: tuple[float, ...] = setting((99.0, 6.0, 4.0, 2.0, 0.25), "bounds of entropy", least=0.0, quick=(99.0, 2.0))


@value
class ByCoin(Switch):
    """The model with probability `share`, by a coin every ten tokens: the last bits of the entropy, scrambled."""

    share: Number

    def started(self) -> SwitchState:
        """Return the small model as the speaker, until the first prediction is known."""
        nothing = jnp.zeros(1, jnp.float32)
        return SwitchState(speaker=jnp.asarray(SMALL, jnp.int32), window=nothing, since=jnp.asarray(0, jnp.int32))

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Toss for the first word, once; `window` says that it is decided."""
        undecided = (state.since == 0) & (state.window[0] == 0)
        first = jnp.where(undecided, self._tossed(state, entropy), state.speaker)
        return replace(state, speaker=first, window=jnp.ones_like(state.window))

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Toss where a run begins."""
        counted = replace(state, since=state.since + 1)
        return replace(counted, speaker=self._tossed(counted, entropy))

    def _tossed(self, state: SwitchState, entropy: Float[Array, ""]) -> Array:
        bits = jax.lax.bitcast_convert_type(entropy, jnp.uint32) * jnp.uint32(2654435769)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
        coin = (bits >> 8).astype(jnp.float32) * 2.0**-24
        return jnp.where(state.since % RUN == 0, jnp.where(coin < self.share, MODEL, SMALL), state.speaker)


def agreement(model: Model, prompts: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return of each text the share of tokens that the model would have said, and its mean log-probability of one."""
    number, length = tokens.shape
    logits, targets = held_out_logits(model.config, model.params, np.concatenate([prompts, tokens], axis=1))
    seeds = jnp.stack([jnp.zeros(number, jnp.uint32), jnp.arange(number, dtype=jnp.uint32)], axis=1)
    key = jax.vmap(fold_key, in_axes=(0, None))(replace(plain((number,)), key=seeds), jnp.int32(0)).key
    position = jnp.tile(jnp.arange(length, 2 * length, dtype=jnp.int32), number)
    heat = jnp.full(number * length, TEMPERATURE, jnp.float32)
    would = jax.jit(sample_token)(
        logits, heat, jnp.full_like(heat, -jnp.inf), jnp.repeat(key, length, axis=0), position
    )
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    same, likely = (np.asarray(x, np.float64).reshape(tokens.shape).mean(axis=1) for x in (would == targets, log_p))
    return same, likely


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each bound."""
    sizes = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 2 * settings.tokens}
    alone = {name: load(one, **sizes) for name, one in (("the model", settings.model), ("the small", settings.small))}
    both = load(settings.model, small=settings.small, control="ead", **sizes)
    prompts = text.rows(alone["the model"], settings.text, settings.prompts, settings.tokens)
    params = SamplingParams(max_tokens=settings.tokens, temperature=TEMPERATURE, ignore_eos=True)
    requests = [
        GenerationRequest(prompt=tuple(prompt), params=replace(params, seed=seed))
        for seed, prompt in enumerate(prompts.tolist())
    ]

    @cache
    def said(name: str, bits: float) -> dict[str, Any]:
        model, control = alone.get(name, both), None
        if name == "random":
            share = float(said("as printed", bits)["share"].mean())
            control = Controller(switch=ByCoin(share))
        elif name not in alone:
            control = Controller(switch={"as printed": AsPrinted, "guarded": Hysteresis}[name](bits * math.log(2)))
        done = model.generate(requests, control=control)
        same, likely = agreement(alone["the model"], prompts, np.array([one.token_ids for one in done], np.int32))
        by = [[not row.by_small for row in one.trace if row.by_small is not None] for one in done]
        share = np.array([np.mean(one) if one else float(name == "the model") for one in by])
        return {"share": share, "same": same, "likely": likely, "bytes": np.array([one.cost for one in done])}

    for bits in settings.bits:
        names = ("the model", "the small", "as printed", "guarded", "random")
        arms = {name: partial(said, name, 0.0 if name in alone else bits) for name in names}
        yield Group(labels={"bound, bits": bits}, arms=arms, baseline="random")


FIGURES = {
    "share": Figure(header="the model's share of words"),
    "same": Figure(header="tokens as the model's", against="difference"),
    "likely": Figure(header="log-probability, nats", against="difference"),
    "bytes": Figure(header="bytes", against="ratio"),
}
