"""The state of a decoder between two steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import ControlState, Signals
from et_jax.control.controller import Controller
from et_jax.control.draft import DraftLength, DraftState
from et_jax.control.switch import MODEL, SwitchState
from et_jax.decode.cache import kv, pages
from et_jax.decode.config import DecoderConfig
from et_jax.decode.fresh import blank_signals, fresh, law_numbers
from et_jax.decode.plant import PlantState
from et_jax.decode.sampling.settings import Sampling, TokenCounts, plain
from et_jax.decode.sampling.steering import UNLIMITED, Steering, none
from et_jax.models.config import ModelShape
from et_jax.models.stacks import layers_by_place
from et_jax.types import pytree, replace


@pytree
class DecodeState:
    """The full state of a decoder between two steps; a value that can be copied, saved and forked.

    `token` is the last token, not yet in the cache; `length` counts the cached tokens. `generated` tokens were produced
    of at most `limit`. A slot pauses when its `allowance` of tokens, set by the host, is used up: it does not age, and
    its noise does not advance. `laws` has the numbers of every slot's laws, rules and selectors. `signals` are the last
    observations of each slot. `logits` are the last logits, None unless `DecoderConfig.keeps` has them. `text` has
    every token of each sequence by position, including the prompt, and `draft` the record of its drafts. `draft_laws`
    are the laws of draft lengths, the same for all slots; the host may set their numbers between two steps.
    `heavy_blocks` is a bit mask of the blocks with most of the last token's attention mass, None unless the model
    drafts for itself. `plants` are the caches of the models, with pages by `table`: the model's own, and those of a
    small model if there is one. If two models alternate, `switch` has the active model.
    """

    token: Int[Array, " b"]
    length: Int[Array, " b"]
    generated: Int[Array, " b"]
    limit: Int[Array, " b"]
    active: Bool[Array, " b"]
    allowance: Int[Array, " b"]
    arrival: Int[Array, " b"]
    urgency: Float[Array, " b"]
    stop_ids: Int[Array, "b i"]
    logprobs: Bool[Array, " b"]
    sampling: Sampling
    counts: TokenCounts | None
    steering: Steering | None
    text: Int[Array, "b n"]
    draft: DraftState
    draft_laws: tuple[DraftLength, ...]
    heavy_blocks: UInt32[Array, "b l k n32"] | None
    switch: SwitchState | None
    laws: Controller
    signals: Signals
    logits: Float[Array, "b v"] | None
    control: ControlState
    table: pages.PageTable
    plants: tuple[PlantState, ...]

    @property
    def runnable(self) -> Bool[Array, " b"]:
        """Which slots have a sequence that may produce a token."""
        return self.active & (self.allowance > 0)

    @property
    def ended(self) -> Bool[Array, " b"]:
        """Which slots have a sequence that has produced its last token and is not released yet."""
        return ~self.active & (self.generated > 0)

    @property
    def num_cached(self) -> Int[Array, " b"]:
        """Cached tokens of each slot: those of its text so far, less those that compression dropped."""
        shift = self.plants[MODEL].shift
        return self.length if shift is None else self.length - shift

    def with_plant(self, index: int, plant: PlantState) -> "DecodeState":
        """Return the state with plant `index` replaced."""
        return replace(self, plants=(*self.plants[:index], plant, *self.plants[index + 1 :]))


def slot_laws(config: DecoderConfig) -> Controller:
    """Return the numbers of the configuration's own controller, for every slot."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (config.num_slots, *x.shape)), law_numbers(config.controller))


def fresh_control(config: DecoderConfig, laws: Controller, temperature: Float[Array, ""]) -> ControlState:
    """Return the control state of one sequence under `laws` before its first token."""
    begun = fresh(laws, temperature, config.mask_shape, config.fresh_prompt())
    if "masses" not in config.keeps:
        return begun
    shape = config.model.num_layers, config.model.num_heads, config.blocks_per_slot
    return replace(begun, block_mass=jnp.ones(shape, jnp.float32))


def empty(config: DecoderConfig) -> DecodeState:
    """Return the state of a decoder without sequences."""
    b, v, keeps = config.num_slots, config.model.vocab_size, config.keeps
    laws = slot_laws(config)

    def integers(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    def numbers() -> Array:
        return jnp.zeros(b, jnp.float32)

    counts = TokenCounts(in_prompt=jnp.zeros((b, v), bool), generated=integers(b, v))
    return DecodeState(
        token=integers(b),
        length=integers(b),
        generated=integers(b),
        limit=integers(b),
        active=jnp.zeros(b, bool),
        allowance=jnp.full(b, UNLIMITED, jnp.int32),
        arrival=integers(b),
        urgency=numbers(),
        stop_ids=jnp.full((b, config.num_stop_ids), -1, jnp.int32),
        logprobs=jnp.zeros(b, bool),
        sampling=plain((b,)),
        counts=counts if config.penalties else None,
        steering=none((b,), v) if config.penalties else None,
        text=integers(b, config.max_length),
        draft=jax.vmap(config.fresh_drafts, (0, None, 0))(integers(b), config.draft_laws, integers(b)),
        draft_laws=config.draft_laws,
        heavy_blocks=None if config.pruned is None else jnp.zeros((b, *config.mask_shape), jnp.uint32),
        switch=jax.vmap(Controller.switch_started, axis_size=b)(laws),  # laws may have no numbers
        laws=laws,
        signals=blank_signals((b,)),
        logits=jnp.zeros((b, v), jnp.float32) if "logits" in keeps else None,
        control=jax.vmap(partial(fresh_control, config))(laws, numbers()),
        table=pages.empty(b, config.blocks_per_slot, config.num_pages),
        plants=(
            _adapted(config, _compressible(config, _plant(config, config.model, config.keeps))),
            *(_plant(config, other, frozenset()) for other in config.others),
        ),
    )


def _plant(config: DecoderConfig, model: ModelShape, keeps: frozenset[str]) -> PlantState:
    """Return an empty plant, whose cache stores `keeps` beside keys and values."""
    cache = kv.empty(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        config.num_pages,
        config.page_size,
        config.cache_dtype,
        summaries="summaries" in keeps,
        key_codes="codes" in keeps,
        surprisals="surprisals" in keeps,
        depths=tuple(map(len, layers_by_place(model))),
        chips=1 if config.mesh is None else config.mesh.size,
    )
    return PlantState(cache=cache, num_cached=jnp.zeros(config.num_slots, jnp.int32))


def _compressible(config: DecoderConfig, state: PlantState) -> PlantState:
    """Return the state with the fields that compression requires, if it is enabled."""
    how, model, b = config.compression, config.model, config.num_slots
    if how is None:
        return state
    heads = model.num_layers, model.num_kv_heads
    ring = how.window + (0 if config.draft is None else config.draft.most)
    last = model.num_layers, ring, model.num_heads, model.head_dim
    return replace(
        state,
        shift=jnp.zeros(b, jnp.int32),
        skipped=jnp.zeros((b, *heads), jnp.int32) if how.policy.splits else None,
        queries=jnp.zeros((b, *last), config.weights_dtype) if how.policy.reads_queries else None,
    )


def _adapted(config: DecoderConfig, state: PlantState) -> PlantState:
    """Return the state with the adapter number of every slot, if there are adapters."""
    return replace(state, adapter=jnp.zeros(config.num_slots, jnp.int32)) if config.num_adapters else state


def wants_drafts(state: DecodeState) -> bool:
    """Return whether a draft law asks for drafts of an active sequence; this transfers values from the device."""
    active, draft = jax.device_get((state.active, state.draft))
    return bool(np.any(active & draft.wanted))
