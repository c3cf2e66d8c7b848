"""The configuration of a decoder, fixed for its life."""

import dataclasses
import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from et_jax.control import budget as budgets
from et_jax.control.base import num_words
from et_jax.control.compression import Compression, Layout
from et_jax.control.controller import Controller
from et_jax.control.draft import DraftLength, DraftState, FixedLength, started
from et_jax.control.selector import Selector
from et_jax.decode import compat
from et_jax.decode.backends import left_to_xla, scoring_backend, serving_backend
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.decode.fresh import law_numbers, law_sets
from et_jax.decode.plant import Plant
from et_jax.models import sharding
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelShape
from et_jax.models.stacks import compiler_options, stacks_of
from et_jax.pallas.checks import EIGHT_BITS

Keep = Literal["codes", "surprisals", "logits"]
"""What a state may store beyond the needs of selectors: 8-bit keys, tokens' surprisals, slots' last logits."""


class Variant(NamedTuple):
    """The abilities of a decode program: its `rows` per step, whether it drafts, and whether it `chooses` blocks."""

    rows: int
    drafts: bool
    chooses: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder, fixed for its life; each field shapes the compiled programs.

    `num_slots` sequences are resident, `batch` of them advance in a step. `max_length` tokens fit a
    slot. Prompts are prefilled `prefill_batch` tokens at a time, in chunks of `chunk` tokens, a multiple of
    `page_size`, so that one call may process chunks of several prompts. `max_steps` is the most one `decode`
    call can run. At most `num_logprobs` alternatives are reported with a token. `penalties` keeps token
    counts. `backend` names the attention kernels. `calibration` has measurements of the model.
    `controller` has the structure of all laws, and the default numbers of requests.
    `keep` names what the state stores beyond the needs of the controller's selectors: "codes", "surprisals",
    "logits", the last ones of every slot. `draft` configures drafting, None disables it; laws by
    which one token sets what the next may read exclude drafts. `others` are the models
    beside it, of the same vocabulary: a small one that drafts, or is active when the controller's `switch` selects it;
    it uses full attention. With `lazy` only the small model reads prompts, the model reads them when it first
    becomes active. With `audit` each model reports which of the other's tokens were its own likeliest ones when it
    catches up with them; and under a budget the last query of each segment reports its attention mass on the blocks
    read. A budget's segments are chunks. `compression` configures `compress`; None never compresses.
    With `trace_reads` outputs report the blocks that every layer and KV head read. Keys and values are stored in
    `cache_dtype`, possibly one of 8 bits with a scale for each; `dtype` is that of the weights and of queries, None if
    it is the same. Matrices have the form that `quantize` names (`models.weights.QUANTIZED`), None in `dtype`. `mesh`
    has the chips over which the model is split (`models.sharding`), None for one chip. Beside the weights of the model
    there are `num_adapters`.
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
    dtype: DTypeLike | None = None
    quantize: str | None = None
    num_logprobs: int = 0
    num_stop_ids: int = 8
    penalties: bool = False
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    controller: Controller = dataclasses.field(default_factory=Controller)
    keep: frozenset[Keep] = frozenset()
    draft: Drafting | None = None
    others: tuple[ModelShape, ...] = ()
    lazy: bool = False
    audit: bool = False
    compression: Compression | None = None
    trace_reads: bool = False
    mesh: Mesh | AbstractMesh | None = None
    num_adapters: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.batch <= self.num_slots:
            raise ValueError(f"batch: got {self.batch}, wanted 2 to num_slots = {self.num_slots}")
        for name, size, unit in (("chunk", self.chunk, "page_size"), ("prefill_batch", self.prefill_batch, "chunk")):
            if size % getattr(self, unit):
                raise ValueError(f"{name}: got {size}, wanted a multiple of {unit} = {getattr(self, unit)}")
        if self.dtype is None and jnp.dtype(self.cache_dtype) in EIGHT_BITS:
            raise ValueError(
                f"dtype: got None with a cache in {jnp.dtype(self.cache_dtype)}, wanted the dtype of the weights"
            )
        selector = self.controller.selector
        if isinstance(selector, tuple) and len(selector) != self.model.num_layers:
            raise ValueError(f"selector: got {len(selector)} selectors, wanted one per layer: {self.model.num_layers}")
        compat.check(self._case())
        drafts = self.draft is not None and self.draft.drafter is None
        wanted = (self.model.vocab_size,) * (drafts or self.takes_turns)
        if (got := tuple(other.vocab_size for other in self.others)) != wanted:
            raise ValueError(f"others: got models of {got} tokens, wanted {wanted}: those that draft or take turns")
        self._check_budget()
        if self.compression is not None:
            self.compression.layout(self.page_size, self.model.windows)
        self._check_mesh()

    def _case(self) -> compat.Case:
        """Return the settings to check, by their names in `load`."""
        given = {"draft": self.draft, "small": self.takes_turns and self.others, "cache_budget": self.compression}
        return compat.Case(
            given={name: one for name, one in given.items() if one},
            laws=self.controller,
            sets=lambda: self.law_sets,
            num_layers=self.model.num_layers,
            mixture=self.model.experts is not None,
            needs=self.keep,
            splits=self.compression is not None and self.compression.policy.splits,
            small_drafter=self.draft is not None and self.draft.drafter is None,
        )

    def _check_budget(self) -> None:
        """Raise ValueError if the controller's budget excludes another setting."""
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

    def _check_mesh(self) -> None:
        """Raise ValueError if a mesh excludes another setting."""
        if self.mesh is None:
            return
        for model in self.models:
            sharding.check(model, self.mesh)
        if self.controller.budget is not None and self.controller.budget.compares_heads:
            raise ValueError("mesh: got one with a budget that compares heads, wanted one for each head")

    @property
    def of_chip(self) -> ModelShape:
        """The model with the heads of one chip: all of them without a mesh."""
        return self.model if self.mesh is None else sharding.of_chip(self.model, self.mesh)

    @property
    def models(self) -> tuple[ModelShape, ...]:
        """The model, and the others."""
        return self.model, *self.others

    def compiler_options(self, platform: str) -> dict[str, bool | int] | None:
        """Return the compiler options of programs on a platform if its programs loop over layers, else None."""
        found = (stack for model in self.models for stack in stacks_of(model))
        return compiler_options(platform) if any(stack.depth > 1 for stack in found) else None

    @property
    def most_per_step(self) -> int:
        """The most tokens that a step produces for a sequence."""
        return 1 if self.draft is None else 1 + self.draft.most

    @property
    def full_variant(self) -> Variant:
        """The decode program with all abilities."""
        return Variant(self.batch, self.draft is not None, True)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The decode programs, the full one first; the others have fewer abilities, and equal results.

        Steps for few sequences have 2 rows, 8 and so on, up to half of `batch`, except with drafts, whose
        program has steps of several widths.
        """
        rows, drafts = [self.batch], [self.draft is not None]
        if self.draft is None:
            rows += [2 * 4**power for power in range(self.batch.bit_length()) if 4 * 4**power <= self.batch]
        else:
            drafts += [False]
        chooses = [True] if self.controller.min_context is None else [True, False]
        return tuple(Variant(*one) for one in itertools.product(rows, drafts, chooses))

    def may_choose(self, laws: Controller) -> bool:
        """Return whether a sequence under such laws may ever be long enough for block selection."""
        return laws.min_context is None or bool(laws.min_context <= self.max_length)

    @property
    def takes_turns(self) -> bool:
        """Whether two models take turns, by the controller's switch."""
        return self.controller.switch is not None

    @property
    def law_sets(self) -> frozenset[str]:
        """The fields of `ControlState` that the controller's law sets."""
        return law_sets(self.controller, self.mask_shape, self.fresh_prompt)

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """The shape of a sequence's packed block mask."""
        return self.model.num_layers, self.model.num_kv_heads, num_words(self.blocks_per_slot)

    def fresh_prompt(self) -> budgets.PromptRecord | None:
        """Return the record of a prompt before its first segment; None without a budget."""
        if self.controller.budget is None:
            return None
        return budgets.begun(self.controller.budget, self.model.num_layers, self.model.num_kv_heads, probed=self.audit)

    @property
    def pruned(self) -> Pruned | None:
        """The settings of self-drafting; None without it."""
        return None if self.draft is None else self.draft.pruned

    @property
    def draft_laws(self) -> tuple[DraftLength, ...]:
        """The draft length laws, as a state stores them; none without drafts."""
        return () if self.draft is None else jax.tree.map(jnp.asarray, law_numbers(self.draft.laws))

    def fresh_drafts(self, most: Int[Array, ""], laws: tuple[DraftLength, ...], context: Int[Array, ""]) -> DraftState:
        """Return the draft state of a sequence before its first draft, whose request allows `most` tokens a step.

        `laws` are the draft length laws, as last fitted by the host, none without drafts. The cache has `context`
        tokens.
        """
        return started(FixedLength(), most) if self.draft is None else self.draft.started(most, laws, context)

    @property
    def pages_per_swap(self) -> int:
        """Pages that a prompt chunk fills; swaps move as many pages at a time."""
        return self.prefill_batch // self.page_size

    @property
    def layout(self) -> Layout | None:
        """What a compression keeps, in blocks; None without compression."""
        return None if self.compression is None else self.compression.layout(self.page_size, self.model.windows)

    @property
    def blocks_per_slot(self) -> int:
        """The number of blocks of a slot of `max_length` tokens."""
        return -(-self.max_length // self.page_size)

    @property
    def keeps(self) -> frozenset[str]:
        """What the state stores besides keys and values: needs of selectors, `keep`, and their dependencies."""
        needed = self.keep.union(*(selector.needs for selector in self.selectors)) - {"sensitivity"}
        boxes = "codes" in needed or self.controller.budget is not None
        surprisals = "surprisals" in needed
        return needed | ({"summaries"} if boxes else set()) | ({"logits"} if surprisals else set())

    @property
    def by_mass_of(self) -> int:
        """Query heads per KV head whose last masses select its blocks; 0 if selection does not use them."""
        return self.model.group_size if "masses" in self.keeps else 0

    @property
    def scoring(self) -> tuple[str, tuple[str, ...]]:
        """The backend that scores blocks, that of attention or a fallback, and the refusals of better ones."""
        codes = "codes" in self.keeps
        return scoring_backend(self.of_chip, self.page_size, self.cache_dtype, codes, self.backend)

    @property
    def left_to_xla(self) -> tuple[str, ...]:
        """The operations of selectors that XLA runs between kernels: a sentence for each selector and reason."""
        needs = self.keeps.union(*(selector.needs for selector in self.selectors))
        shape = self.of_chip, self.page_size, self.blocks_per_slot, needs
        return tuple(
            f"XLA runs {', '.join(names)} of {selector}: {reason}"
            for selector in dict.fromkeys(self.selectors)
            for reason, names in left_to_xla(*shape, selector).items()
        )

    @property
    def weights_dtype(self) -> DTypeLike:
        """The dtype of weights and queries."""
        return self.cache_dtype if self.dtype is None else self.dtype

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selector of every layer."""
        return self.controller.selectors(self.model.num_layers)

    @property
    def plants(self) -> tuple[Plant, ...]:
        """The model and the others, each with the best kernels from `backend` on."""
        size, dtype = self.page_size, self.weights_dtype
        kernels = {"backend": self.backend, "scores_backend": self.scoring[0]}
        model = Plant(model=self.model, page_size=size, mesh=self.mesh, **kernels)
        chips = self.others if self.mesh is None else [sharding.of_chip(other, self.mesh) for other in self.others]
        backends = [serving_backend(other, size, dtype, self.cache_dtype, self.backend)[0] for other in chips]
        both = zip(self.others, backends, strict=True)
        alike = {"page_size": size, "mesh": self.mesh}
        return model, *(Plant(model=one, backend=name, scores_backend=name, **alike) for one, name in both)
