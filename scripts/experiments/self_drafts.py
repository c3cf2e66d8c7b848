"""What a model gains that drafts for itself, reading few blocks, by context, sequences and acceptance rate.

A random model, by default in the shape of SmolLM-135M, goes on from caches of random keys and values. Its drafts are
drawn from passes of its own, and then made to hold at a given rate: at each position the draft is the token of the
plain text, or a wrong one. It decodes in bursts, as a server does, and the laws of lengths are given the time of each
step by the clock; each rate learns by itself, from its first round on. Every text is checked to be the plain one.
`part` `steps` times single steps that draft and verify so many tokens, beside a plain step.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from et_jax.decode import drafter
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decoder, snapshot
from et_jax.decode.draft import Drafting, Pruned, by_roofline, rough_times
from et_jax.decode.fresh import law_numbers
from et_jax.decode.plant import PlantState
from et_jax.decode.sample import guess
from et_jax.decode.state import DecodeState, wants_drafts
from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration
from et_jax.models.params import in_stacks
from et_jax.models.stacks import stacked_on
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.serve.sizing import DEFAULT_PAGE_SIZE, read_sizes
from et_jax.serve.step_clock import StepClock
from et_jax.types import Table, replace
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.shapes import SHAPES, shaped
from scripts.measuring.states import filled, with_random_pages
from scripts.measuring.timing import Round

MOST, BURST, STEPS = 12, 0.05, 32  # tokens drafted; seconds; steps of a burst at most


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    parts: tuple[str, ...] = setting(("texts", "steps"), "what is timed", choices=("texts", "steps"))
    contexts: tuple[int, ...] = setting((2048, 4096, 8192, 16_384, 32_768), "tokens before the text", quick=(128,))
    sequences: tuple[int, ...] = setting((1, 4, 16), "decoded together", least=1, quick=(1,))
    rates: tuple[float, ...] = setting((0.9, 0.45, 0.0), "of drafts that hold", least=0.0, most=1.0, quick=(0.9,))
    drafted: tuple[int, ...] = setting((1, 4, 8, 12), "tokens of a single step", least=1, most=MOST, quick=(4,))
    tokens: int = setting(64, "tokens of a text", least=2, quick=8)
    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    gigabytes: float = setting(8.0, "that a cache may take; larger cases are left out", least=0.0)
    rounds: int = setting(3, "rounds in which all take turns", least=2, quick=2)


def configuration(settings: Settings, context: int, sequences: int) -> DecoderConfig:
    """Return a decoder that has room for so many sequences of so many tokens, and for their texts."""
    page, slots = DEFAULT_PAGE_SIZE[jax.default_backend()], max(2, sequences)
    length = -(-(context + settings.tokens + MOST + 3) // page) * page
    model = shaped(settings.shape, settings.layers, length)
    heads = np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32)
    return DecoderConfig(
        model=model,
        num_slots=slots,
        batch=slots,
        page_size=page,
        num_pages=slots * length // page + 1,
        max_length=length,
        prefill_batch=page,
        chunk=page,
        max_steps=STEPS,
        cache_dtype=jnp.bfloat16,
        backend=pick(),
        calibration=Calibration(sensitivity=Table(heads)),
        stacked=stacked_on(jax.default_backend()),
    )


def told(state: DecodeState, rows: Any, logits: Array, position: Int[Array, " r"]) -> Int[Array, " r"]:
    """Draw a token as a draft is drawn, and return the one that is in the text already, behind its end."""
    drawn, text = guess(state, rows, logits, position), rows.take(state.text)
    ahead = jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(drawn < 0, drawn, ahead)  # no draw is below 0, but no compiler knows


@dataclass
class Learnt:
    """The clock of an arm, and the laws that it has told; both go on from text to text."""

    clock: StepClock
    laws: Any


class Case:
    """Random weights and one cache, which plain decoding and decoding with drafts use in turns."""

    def __init__(self, settings: Settings, context: int, sequences: int) -> None:
        self.settings, self.context, self.sequences = settings, context, sequences
        plain = configuration(settings, context, sequences)
        times = rough_times(plain.batch, read_sizes(plain), passing=1.0, share=Pruned.share)
        how = Drafting(most=MOST, length=by_roofline(MOST, plain.batch, times), drafter=Pruned(), times=times)
        weights = initialise(plain.model, jax.random.key(settings.seed), jnp.bfloat16)
        stack = plain.stacked and in_stacks(weights, plain.model, lambda *each: jnp.stack(each))
        self.weights = (stack or weights,)
        state = with_random_pages(plain, filled(plain, 1, 0.0))
        self.cache: PlantState = state.plants[0]
        state = replace(state, plants=())
        drafting = replace(plain, draft=how)
        drafted = replace(
            state,
            draft=replace(state.draft, most=jnp.full(plain.num_slots, MOST, jnp.int32)),
            draft_laws=drafting.draft_laws,
            heavy_blocks=jnp.zeros((plain.num_slots, *plain.mask_shape), jnp.uint32),
        )
        self.decoders = {False: (decoder(plain), state), True: (decoder(drafting), drafted)}
        self.expected = self.text(False, self.learnt(False))[1]

    def learnt(self, drafts: bool) -> Learnt:
        """Return what an arm knows at first."""
        d, state = self.decoders[drafts]
        clock = StepClock(d.config)
        return Learnt(clock=clock, laws=law_numbers(clock.begin() or state.draft_laws))

    def begun(self, drafts: bool, laws: Any) -> DecodeState:
        """Return the state of texts after the context, with the cache."""
        d, state = self.decoders[drafts][0], snapshot(self.decoders[drafts][1])
        run = jnp.arange(len(state.active)) < self.sequences
        limit, length = (jnp.where(run, n, 0).astype(jnp.int32) for n in (self.settings.tokens, self.context))
        state = replace(state, active=run, limit=limit, length=length, draft_laws=jax.tree.map(jnp.copy, laws))
        fresh = jax.vmap(d.config.fresh_drafts, (0, None, 0))(state.draft.most, state.draft_laws, length)
        return jax.block_until_ready(replace(state, draft=fresh, plants=(self.cache,)))

    def ended(self, state: DecodeState) -> None:
        """Keep the cache for the next text."""
        [plant] = state.plants
        self.cache = replace(plant, num_cached=jnp.zeros_like(plant.num_cached))

    def text(self, drafts: bool, learnt: Learnt, guesses: Any = None) -> tuple[float, list[list[int]], dict[str, int]]:
        """Return the seconds of a text in each sequence, the texts, and the tokens drafted and accepted."""
        d, tokens = self.decoders[drafts][0], self.settings.tokens
        config, state = d.config, self.begun(drafts, learnt.laws)
        if guesses is not None:
            ahead = slice(self.context + 1, self.context + 1 + tokens)
            state = replace(state, text=state.text.at[: self.sequences, ahead].set(guesses))
        texts: list[list[int]] = [[] for _ in range(self.sequences)]
        spent, steps, counts = 0.0, 1, {"drafted": 0, "accepted": 0}
        while min(map(len, texts)) < tokens:
            began = time.perf_counter()
            variant = config.whole._replace(drafts=wants_drafts(state))
            state, output, ran = d.variants[variant](self.weights, state, np.int32(steps))
            output, ran = jax.device_get((output, ran))
            took, ran = time.perf_counter() - began, int(ran)
            spent, steps = spent + took, int(np.clip(BURST * ran / took, 1, STEPS))
            if (laws := learnt.clock.note(output, ran, took, variant)) is not None:
                learnt.laws = law_numbers(laws)
                state = replace(state, draft_laws=jax.tree.map(jnp.asarray, learnt.laws))
            token, produced = (x[:ran].reshape(-1, config.num_slots) for x in (output.token, output.produced))
            for slot, text in enumerate(texts):
                text += token[produced[:, slot], slot].tolist()
            counts = {name: old + int(getattr(output, name)[:ran].sum()) for name, old in counts.items()}
        self.ended(state)
        return spent, texts, counts

    def texts(self, rate: float | None) -> Round:
        """Return rounds of texts, plain or with drafts that hold at a rate."""
        drafts, guesses = rate is not None, None
        learnt = self.learnt(drafts)
        if rate is not None:
            right = np.random.default_rng(1).random(np.shape(self.expected)) < rate
            wrong = (np.asarray(self.expected) + 1) % SHAPES[self.settings.shape].vocab_size
            guesses = np.where(right, self.expected, wrong).astype(np.int32)

        def timed() -> dict[str, float]:
            spent, texts, counts = self.text(drafts, learnt, guesses)
            if texts != self.expected:
                raise UsageError(f"Drafts that hold at {rate} changed a text at {self.context} tokens.")
            return {"milliseconds": 1e3 * spent / self.settings.tokens, **counts}

        return timed

    def steps(self, drafted: int) -> Round:
        """Return rounds of a step that drafts so many tokens. One before it, untimed, chooses the blocks it reads."""

        def timed() -> dict[str, float]:
            config = self.decoders[True][0].config
            decode = self.decoders[True][0].variants[config.whole._replace(drafts=drafted > 0)]
            state = self.begun(True, self.learnt(True).laws)
            wanted = jnp.where(state.active, drafted, 0).astype(jnp.int32)
            length, spent = jnp.copy(state.length), 0.0
            for _ in range(2):
                again = {"length": jnp.copy(length), "generated": jnp.zeros_like(state.generated)}
                again |= {"draft": replace(state.draft, length=jnp.copy(wanted))}
                state, began = jax.block_until_ready(replace(state, **again)), time.perf_counter()
                state, output, _ = jax.block_until_ready(decode(self.weights, state, np.int32(1)))
                spent = time.perf_counter() - began
            got = np.asarray(output.drafted)[0, 0, : self.sequences]
            if (got != drafted).any():
                raise UsageError(f"A step drafted {got} tokens where {drafted} were asked for.")
            self.ended(state)
            return {"milliseconds": 1e3 * spent}

        return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield groups of texts and of steps for each number of sequences and context that fits."""
    for sequences, context in itertools.product(settings.sequences, settings.contexts):
        config = configuration(settings, context, sequences)
        if read_sizes(config).token * config.page_size * config.num_pages > 1e9 * settings.gigabytes:
            continue
        with mock.patch.object(drafter, "guess", told):
            case = Case(settings, context, sequences)
            for part in settings.parts:
                arms: dict[str, Callable[[], Round]] = {"plain": partial(case.texts, None)}
                arms |= {f"drafts hold at {rate:g}": partial(case.texts, rate) for rate in settings.rates}
                if part == "steps":
                    arms = {
                        "plain" if n == 0 else f"{n} drafted": partial(case.steps, n) for n in (0, *settings.drafted)
                    }
                labels = {"part": part, "context": context, "sequences": sequences}
                yield Group(labels=labels, arms=arms, baseline="plain", rounds=settings.rounds)
        jax.clear_caches()


EXPERIMENT = Experiment(
    question="What does a model gain that drafts for itself, by context, sequences and acceptance rate?",
    settings=Settings,
    groups=groups,
    figures={
        "milliseconds": Figure(header="ms a token, or a step", against="ratio"),
        "drafted": Figure(header="drafted"),
        "accepted": Figure(header="accepted"),
    },
    timed=True,
)
