"""What a decoder holds between two steps: its configuration, its state, what it reports."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import budget as budgets
from et_jax.control.base import ControlState, Signals, num_words, started, updated
from et_jax.control.compression import Compression, Layout
from et_jax.control.controller import Controller
from et_jax.control.draft import DraftState
from et_jax.control.draft import started as drafting_started
from et_jax.control.select import Selector
from et_jax.control.switch import MODEL, SwitchState
from et_jax.decode import cache as kv
from et_jax.decode import compat, pages
from et_jax.decode.backends import scoring_backend, serving_backend
from et_jax.decode.draft import Drafting
from et_jax.decode.plant import Plant, PlantState
from et_jax.decode.sampling import Sampling, TokenCounts, plain
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelShape
from et_jax.types import pytree, replace

Keep = Literal["codes", "surprisals", "logits"]
"""What a state may hold beyond what selectors need: 8-bit keys, every token's surprisal, every slot's last logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What is fixed for the life of a decoder; each field shapes the compiled programs.

    `num_slots` sequences are resident, `batch` of them advance in a step. `max_length` tokens fit a
    slot. Prompts are prefilled `prefill_batch` tokens at a time, in chunks of `chunk` tokens, a multiple of
    `page_size`, so that one call may hold chunks of several prompts. `max_steps` is the most one `decode`
    call can run. At most `num_logprobs` alternatives are reported with a token. `penalties` keeps token
    counts. `backend` names the attention kernels. `calibration` is what was measured of the model.
    `controller` gives the structure of all laws, and the numbers of requests that bring none of their own.
    `keep` names what the state holds beyond what the controller's selectors need: "codes", "surprisals",
    "logits", the last ones of every slot. `draft` says how tokens are drafted, None that none are; laws by
    which one token sets what the next may read (`steers_reading`) leave nothing to draft. `small` is a second model
    of the same vocabulary, which drafts, or speaks where the controller's `switch` says so; it reads all that it has
    seen. With `lazy` prompts are read by the small model alone, and by the model when it first speaks. With `audit`
    either model says of the other's words, as it catches up with them, which were likeliest to it too; and under a
    budget the last query of each segment says how much of its attention was on the blocks read. A budget's segments are
    chunks. `compression` says what `compress` keeps of a sequence's cache; None is all of it, always. With `tell_reads`
    outputs tell what every layer and KV head read.
    """

    model: ModelShape
    num_slots: int
    batch: int
    page_size: int
    num_pages: int
    max_length: int
    prefill_batch: int
    chunk: int
    max_steps: int
    cache_dtype: DTypeLike
    backend: str
    num_logprobs: int = 0
    num_stop_ids: int = 8
    penalties: bool = False
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    controller: Controller = dataclasses.field(default_factory=Controller)
    keep: frozenset[Keep] = frozenset()
    draft: Drafting | None = None
    small: ModelShape | None = None
    lazy: bool = False
    audit: bool = False
    compression: Compression | None = None
    tell_reads: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.batch <= self.num_slots:
            raise ValueError(f"batch: got {self.batch}, wanted 2 to num_slots = {self.num_slots}")
        for name, size, unit in (("chunk", self.chunk, "page_size"), ("prefill_batch", self.prefill_batch, "chunk")):
            if size % getattr(self, unit):
                raise ValueError(f"{name}: got {size}, wanted a multiple of {unit} = {getattr(self, unit)}")
        selector = self.controller.selector
        if isinstance(selector, tuple) and len(selector) != self.model.num_layers:
            raise ValueError(f"selector: got {len(selector)} selectors, wanted one per layer: {self.model.num_layers}")
        compat.check(self._case())
        drafts, speaks = self.draft is not None and self.draft.drafter is None, self.controller.switch is not None
        if (self.small is not None) != (drafts or speaks):
            raise ValueError("small: got a model that neither drafts nor speaks, or none that should; wanted both")
        self._check_budget()
        if self.small is not None and self.small.vocab_size != self.model.vocab_size:
            sizes = f"{self.small.vocab_size} tokens, wanted {self.model.vocab_size}"
            raise ValueError(f"small: got a vocabulary of {sizes} as the model has")
        if self.compression is not None:
            self.compression.layout(self.page_size, self.model.windows)

    def _case(self) -> compat.Case:
        """What is to go together, by the names of `load`."""
        small = None if self.controller.switch is None else self.small
        given = {"draft": self.draft, "small": small, "cache_budget": self.compression}
        return compat.Case(
            given={name: one for name, one in given.items() if one is not None},
            laws=self.controller,
            steers=lambda: self.steers_reading,
            num_layers=self.model.num_layers,
            needs=self.keep,
            splits=self.compression is not None and self.compression.policy.splits,
        )

    def _check_budget(self) -> None:
        """Raise ValueError where the controller's budget does not go with the rest."""
        budget = self.controller.budget
        if budget is None:
            return
        rounded = -(-budget.segment // self.page_size) * self.page_size
        if self.chunk != rounded:
            raise ValueError(
                f"chunk: got {self.chunk} under a budget of segments of {budget.segment}, wanted {rounded}"
            )
        if 0 < budget.fewest_tokens < self.page_size:
            raise ValueError(
                f"budget: got one of {budget.fewest_tokens} tokens, wanted at least a block of {self.page_size}"
            )

    @property
    def steers_reading(self) -> bool:
        """Whether what a token's step observes decides what the next token reads.

        True of laws that set the tolerance or the blocks after a token, of blocks chosen every few tokens, and of
        selectors that go by surprisals or by the last masses.
        """
        by_law = law_steers(self.controller, _mask_shape(self), partial(fresh_prompt, self))
        return by_law or self.controller.refresh_every > 1 or bool(self.keeps & {"surprisals", "masses"})

    @property
    def keeps_text(self) -> bool:
        """Whether the state holds every text: drafts are looked up in it, and a model that lags catches up from it."""
        return self.draft is not None or self.controller.switch is not None

    @property
    def pages_per_swap(self) -> int:
        """Pages a prompt chunk fills; pages move to the host and back as many at a time."""
        return self.prefill_batch // self.page_size

    @property
    def layout(self) -> Layout | None:
        """What a compression keeps, in blocks; None where nothing is compressed."""
        return None if self.compression is None else self.compression.layout(self.page_size, self.model.windows)

    @property
    def blocks_per_slot(self) -> int:
        """Blocks a slot of `max_length` tokens holds."""
        return -(-self.max_length // self.page_size)

    @property
    def keeps(self) -> frozenset[str]:
        """What the state holds beside keys and values: needs of selectors, `keep`, and what those rest on."""
        needed = self.keep.union(*(selector.needs for selector in self.selectors)) - {"sensitivity"}
        boxes = "codes" in needed or self.controller.budget is not None
        surprisals = "surprisals" in needed
        return needed | ({"summaries"} if boxes else set()) | ({"logits"} if surprisals else set())

    @property
    def by_mass_of(self) -> int:
        """The query heads of a KV head whose last masses choose its blocks; 0 where something else chooses them."""
        return self.model.group_size if "masses" in self.keeps else 0

    @property
    def scoring(self) -> tuple[str, tuple[str, ...]]:
        """The backend that scores blocks, and why no better one does: that of attention if it can."""
        codes = "codes" in self.keeps
        return scoring_backend(self.model, self.page_size, self.cache_dtype, codes, self.backend)

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selector of every layer."""
        return self.controller.selectors(self.model.num_layers)

    @property
    def plants(self) -> tuple[Plant, ...]:
        """The model, and the small one beside it, each with the best kernels from `backend` on."""
        size, dtype = self.page_size, self.cache_dtype
        model = Plant(model=self.model, page_size=size, backend=self.backend, scores_backend=self.scoring[0])
        if self.small is None:
            return (model,)
        backend = serving_backend(self.small, size, dtype, self.backend)[0]
        return model, Plant(model=self.small, page_size=size, backend=backend, scores_backend=backend)


@pytree
class Spent:
    """What the model and the small one did for a sequence: tokens read, and passes, each divided by the rows it had.

    Of `audited` words that one said and the other read to catch up, `agreed` were the likeliest to the other; both are
    None where nothing is audited.
    """

    tokens: Int[Array, "*b m"]
    passes: Float[Array, "*b m"]
    audited: Int[Array, "*b"] | None
    agreed: Int[Array, "*b"] | None


@pytree
class DecodeState:
    """Everything a decoder knows between two steps; a value: copy it, save it, fork it.

    `token` is the last token, not yet in the cache; `length` counts the tokens that are. `generated`
    tokens were produced of at most `limit`. `laws` holds the numbers of every slot's laws, rules and
    selectors. `signals` is what was last observed of each slot. `logits` are the last ones, None unless they
    are kept (`DecoderConfig.keeps`). `text` holds every token of each sequence by its position, prompt included, and
    `draft` how its drafts fare; both are None where nothing is drafted. `plants` are what the models hold, whose pages
    are those of `table`: the model whose text it is, and the small one where there is one. Where they take turns,
    `switch` says which of them is active, and `spent` what both did since the last token.
    """

    token: Int[Array, " b"]
    length: Int[Array, " b"]
    generated: Int[Array, " b"]
    limit: Int[Array, " b"]
    active: Bool[Array, " b"]
    arrival: Int[Array, " b"]
    urgency: Float[Array, " b"]
    stop_ids: Int[Array, "b i"]
    logprobs: Bool[Array, " b"]
    sampling: Sampling
    counts: TokenCounts | None
    text: Int[Array, "b n"] | None
    draft: DraftState | None
    switch: SwitchState | None
    spent: Spent | None
    laws: Controller
    signals: Signals
    logits: Float[Array, "b v"] | None
    control: ControlState
    table: pages.PageTable
    plants: tuple[PlantState, ...]

    @property
    def num_cached(self) -> Int[Array, " b"]:
        """Tokens that the pages of each slot hold: of its text so far, less those that compression left out."""
        shift = self.plants[MODEL].shift
        return self.length if shift is None else self.length - shift

    def with_plant(self, index: int, plant: PlantState) -> "DecodeState":
        """Return the state with another plant's state in the place of one."""
        return replace(self, plants=(*self.plants[:index], plant, *self.plants[index + 1 :]))


@pytree
class StepOutput:
    """What a step did for every slot; rows where `produced` is False hold nothing to read.

    `refused` slots were to advance but no page was free: nothing of them changed. `fault` is above 0
    where a slot was stopped, its text ending before this token: the logits were no numbers, or a law set
    a field to what it may not be (`faults.sentence`). `temperature`
    is the one the token was drawn at. `guard_rates` is the share of tokens that each counting guard has
    flagged, by its name. `top_tokens` and `top_logprobs` are None where the decoder reports none, and 0
    in steps where no sequence asks for them. `drafted` counts the tokens that were drafted for a slot in the step,
    `accepted` those that held; `blocks_wasted` and `summaries_wasted` are what was read for the others. All four
    stand with its first token. So do `small_tokens`, those that the small model read for a slot, and `small_passes`,
    how often all its weights were read in the step; None where there is no such model. Where either model may speak,
    `by_small` tells whose token it is, and `spent` what both did for it, since the one before. `reads` counts the
    blocks that each layer and KV head of the model read for the token, None unless the decoder tells it; with a token
    of the small model of a switch it stands for nothing.
    """

    token: Int[Array, "*b"]
    produced: Bool[Array, "*b"]
    finished: Bool[Array, "*b"]
    fault: Int[Array, "*b"]
    refused: Bool[Array, "*b"]
    temperature: Float[Array, "*b"]
    entropic_time: Float[Array, "*b"]
    total_cost: Float[Array, "*b"]
    drafted: Int[Array, "*b"]
    accepted: Int[Array, "*b"]
    blocks_wasted: Int[Array, "*b"]
    summaries_wasted: Int[Array, "*b"]
    guard_rates: dict[str, Float[Array, "*b"]]
    signals: Signals
    top_tokens: Int[Array, "*b a"] | None
    top_logprobs: Float[Array, "*b a"] | None
    small_tokens: Int[Array, "*b"] | None = None
    small_passes: Int[Array, "*b"] | None = None
    by_small: Bool[Array, "*b"] | None = None
    spent: Spent | None = None
    reads: Int[Array, "*b l k"] | None = None


def blank_signals(shape: tuple[int, ...]) -> Signals:
    """Return signals of nothing observed yet."""
    fields = {f.name: jnp.zeros(shape, jnp.float32) for f in dataclasses.fields(Signals)}
    whole = ("blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "pages_held")
    return Signals(**(fields | {name: jnp.zeros(shape, jnp.int32) for name in whole}))


def law_numbers(controller: Controller) -> Controller:
    """Return a controller with its numbers as arrays of 32 bits, as a state holds them."""
    return jax.tree.map(lambda x: np.asarray(x, np.int32 if isinstance(x, int) else np.float32), controller)


def slot_laws(config: DecoderConfig) -> Controller:
    """Return the numbers of the configuration's own controller, for every slot."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (config.num_slots, *x.shape)), law_numbers(config.controller))


def fresh_control(config: DecoderConfig, laws: Controller, temperature: Float[Array, ""]) -> ControlState:
    """Return the control state of one sequence under `laws` before its first token."""
    fresh = _fresh(laws, temperature, _mask_shape(config), fresh_prompt(config))
    if "masses" not in config.keeps:
        return fresh
    shape = config.model.num_layers, config.model.num_heads, config.blocks_per_slot
    return replace(fresh, block_mass=jnp.ones(shape, jnp.float32))


def _mask_shape(config: DecoderConfig) -> tuple[int, int, int]:
    return config.model.num_layers, config.model.num_kv_heads, num_words(config.blocks_per_slot)


def _fresh(
    laws: Controller, temperature: Float[Array, ""], mask: tuple[int, int, int], prompt: budgets.PromptNotes | None
) -> ControlState:
    zero = jnp.zeros((), jnp.float32)
    return started(
        laws.law,
        ControlState(
            entropy=zero,
            entropic_time=zero,
            total_cost=zero,
            temperature=temperature,
            surprisal_cap=jnp.full((), jnp.inf, jnp.float32),
            tolerance=zero,
            priority=zero,
            wait=jnp.zeros((), jnp.int32),
            block_mask=jnp.zeros(mask, jnp.uint32),
            notes={},
            prompt=prompt,
        ),
    )


def law_steers(
    laws: Controller,
    mask: tuple[int, int, int] = (1, 1, 1),
    prompt: Callable[[], budgets.PromptNotes | None] = lambda: None,
) -> bool:
    """Return whether the law sets what the next token reads: the tolerance, or the blocks, whose mask has this shape.

    Those of presets do or do not whatever the shape is.
    """
    steers = []

    def start(temperature: Float[Array, ""]) -> ControlState:
        return _fresh(law_numbers(laws), temperature, mask, prompt())

    def run(signals: Signals, state: ControlState) -> ControlState:
        after = updated(laws.law, signals, state)
        steers.append(after.tolerance is not state.tolerance or after.block_mask is not state.block_mask)
        return after

    jax.eval_shape(run, blank_signals(()), jax.eval_shape(start, jnp.zeros((), jnp.float32)))
    return steers[0]


def fresh_prompt(config: DecoderConfig) -> budgets.PromptNotes | None:
    """Return the notes of a prompt of which nothing is read; None where no budget chooses what it reads."""
    if config.controller.budget is None:
        return None
    heads = config.model.num_layers, config.model.num_kv_heads
    return budgets.begun(config.controller.budget, *heads, probed=config.audit)


def empty(config: DecoderConfig) -> DecodeState:
    """Return the state of a decoder that holds no sequence."""
    b, v, keeps = config.num_slots, config.model.vocab_size, config.keeps
    laws, switch = slot_laws(config), config.controller.switch

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
        arrival=integers(b),
        urgency=numbers(),
        stop_ids=jnp.full((b, config.num_stop_ids), -1, jnp.int32),
        logprobs=jnp.zeros(b, bool),
        sampling=plain((b,)),
        counts=counts if config.penalties else None,
        text=integers(b, config.max_length) if config.keeps_text else None,
        draft=None if config.draft is None else drafting_started(config.draft.length, integers(b)),
        switch=None if switch is None else jax.vmap(lambda one: one.started())(laws.switch),
        spent=None
        if switch is None
        else Spent(
            tokens=integers(b, 2),
            passes=jnp.zeros((b, 2), jnp.float32),
            audited=integers(b) if config.audit else None,
            agreed=integers(b) if config.audit else None,
        ),
        laws=laws,
        signals=blank_signals((b,)),
        logits=jnp.zeros((b, v), jnp.float32) if "logits" in keeps else None,
        control=jax.vmap(partial(fresh_control, config))(laws, numbers()),
        table=pages.empty(b, config.blocks_per_slot, config.num_pages),
        plants=tuple(_plant(config, index, plant.model) for index, plant in enumerate(config.plants)),
    )


def _plant(config: DecoderConfig, index: int, model: ModelShape) -> PlantState:
    """A plant that holds nothing. What selectors need, and compression, is kept of the model's own cache alone."""
    how, keeps, b = config.compression, config.keeps if index == MODEL else frozenset(), config.num_slots
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
    )
    state = PlantState(cache=cache, num_cached=jnp.zeros(b, jnp.int32))
    if how is None or index != MODEL:
        return state
    heads = model.num_layers, model.num_kv_heads
    last = model.num_layers, how.window, model.num_heads, model.head_dim
    return replace(
        state,
        shift=jnp.zeros(b, jnp.int32),
        skipped=jnp.zeros((b, *heads), jnp.int32) if how.policy.splits else None,
        queries=jnp.zeros((b, *last), config.cache_dtype) if how.policy.reads_queries else None,
    )
