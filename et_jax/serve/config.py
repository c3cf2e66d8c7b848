"""What a caller may set of an engine, checked in one place; it travels as one value from there on."""

import dataclasses
from pathlib import Path
from typing import Any

from et_jax.control.compression import POLICIES, Compression
from et_jax.control.controller import Controller
from et_jax.control.draft import (
    MOST_DRAFTED,
    DraftLength,
    EntropyLength,
    FixedLength,
    StopEntropy,
)
from et_jax.control.presets import NAMES, preset
from et_jax.decode.draft import by_acceptance
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.pallas.backend import NAMES as BACKENDS

LOOKUP = "lookup"  # drafts from the text itself; any other drafter is a model
LENGTHS = ("acceptance", "entropy", "fixed")
PROGRAMS = "auto"  # compiled programs are kept in the user's cache unless the caller says otherwise
_MOST = 2**20  # of anything that is counted: beyond it no machine has room

Control = str | Controller
"""A preset by name, see `presets.preset`, or a controller of one's own."""


def _decisive(default: Any) -> Any:
    """Return a field that may change a text, be it in the last bit."""
    return dataclasses.field(default=default, metadata={"decisive": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of `load`, which says what each of them means; `control` is a controller here, sizes are integers.

    Raises UsageError, one sentence, for a value of another type or one that cannot work with any model.
    """

    name: str = "bundled"
    dtype: str = _decisive("auto")
    page_size: int | None = _decisive(None)
    max_model_len: int | None = _decisive(None)
    num_pages: int | None = None
    max_num_seqs: int = _decisive(8)
    max_resident_seqs: int | None = None
    max_num_batched_tokens: int = 512
    prefill_batch: int | None = _decisive(None)
    prefix_cache: bool = True
    preempt_every: int = 0
    replicas: int = 1
    control: Control = "off"
    draft: str | Path | None = None
    draft_tokens: int = 8
    draft_length: str = "acceptance"
    small: str | Path | None = dataclasses.field(default=None, metadata={"decisive": True})
    lazy_prefill: bool = False
    audit: bool = False
    tell_reads: bool = False
    cache_budget: int | Compression | None = dataclasses.field(default=None, metadata={"decisive": True})
    cache_policy: str = _decisive("latent")
    backend: str | None = _decisive(None)
    memory_fraction: float = 0.9
    compilation_cache: str | Path | None = PROGRAMS

    def __post_init__(self) -> None:
        checked = {
            "name": str(_text("name", self.name)),
            "dtype": str(_text("dtype", self.dtype)),
            "prefix_cache": values.boolean("prefix_cache", self.prefix_cache),
            "tell_reads": values.boolean("tell_reads", self.tell_reads),
            "preempt_every": values.whole("preempt_every", self.preempt_every, 0, wanted="0 (never) or above"),
            "control": controller(self.control),
            "memory_fraction": values.number("memory_fraction", self.memory_fraction),
        }
        for name in ("page_size", "max_model_len", "num_pages", "prefill_batch", "max_resident_seqs"):
            if getattr(self, name) is not None:
                checked[name] = _count(name, getattr(self, name))
        for name in ("max_num_seqs", "max_num_batched_tokens", "replicas"):
            checked[name] = _count(name, getattr(self, name))
        if self.draft is not None:
            checked["draft"] = str(_text("draft", self.draft))
        if self.small is not None:
            checked["small"] = str(_text("small", self.small))
            if self.draft not in (None, LOOKUP, checked["small"]):
                raise UsageError("draft and small name two models; name one of them, or draft by lookup.")
        for name in ("lazy_prefill", "audit"):
            checked[name] = values.boolean(name, getattr(self, name))
            if name == "audit" and checked["control"].budget is not None:
                continue
            if checked[name] and self.small is None:
                own = ", or a control with a prefill budget" if name == "audit" else ""
                raise UsageError(f"{name} is for two models that take turns{own}; name the other one by small.")
        checked["cache_budget"] = self._checked_budget()
        if self.draft_length not in LENGTHS:
            shown = values.shown(self.draft_length)
            raise UsageError(f"draft_length is {shown}; choose one of {', '.join(LENGTHS)}.")
        checked["draft_tokens"] = values.whole("draft_tokens", self.draft_tokens, 1, MOST_DRAFTED)
        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(f"backend is {values.shown(self.backend)}; choose one of {', '.join(BACKENDS)} or None.")
        if self.compilation_cache not in (None, PROGRAMS):
            checked["compilation_cache"] = Path(_text("compilation_cache", self.compilation_cache))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _checked_budget(self) -> int | Compression | None:
        """Return what the cache keeps. Raises UsageError where that is no number, or does not go with the rest."""
        budget, policy = self.cache_budget, self.cache_policy
        if policy not in POLICIES:
            raise UsageError(f"cache_policy is {values.shown(policy)}; choose one of {', '.join(POLICIES)}.")
        named = policy != EngineConfig.cache_policy
        if named and budget is None:
            raise UsageError("cache_policy says what a cache_budget keeps; set that too, to a number of tokens.")
        if named and isinstance(budget, Compression):
            raise UsageError("cache_budget is a Compression, which has a policy of its own; leave out cache_policy.")
        if budget is None:
            return None
        if self.draft is not None or self.small is not None:
            raise UsageError("cache_budget forgets what drafts and second models read; leave out one or the other.")
        return budget if isinstance(budget, Compression) else _count("cache_budget", budget)

    @property
    def draft_model(self) -> str | None:
        """The model that drafts, if one does."""
        return None if self.draft == LOOKUP or self.draft is None else str(self.draft)

    @property
    def second_model(self) -> str | None:
        """The small model, if there is one, that drafts or speaks."""
        return self.draft_model if self.small is None else str(self.small)

    def lengths(self, batch: int, drafter_cost: float) -> DraftLength:
        """Return how many tokens are drafted, each at `drafter_cost` of a step of the model, 0 if no model drafts.

        Steps have `batch` rows, and drafted ones beside.
        """
        if self.draft_length == "entropy":
            return EntropyLength() if self.draft_model is None else StopEntropy()
        if self.draft_length == "fixed":
            return FixedLength()
        return by_acceptance(self.draft_tokens, self.max_num_seqs, batch, drafter_cost)

    @property
    def given(self) -> dict[str, Any]:
        """Every setting by its name, as `load` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def decisive(self) -> dict[str, Any]:
        """Those of the sizes that may change a text; with the model and the control they decide it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata}


def controller(control: Control) -> Controller:
    """Return the controller that `control` names or is. Raises UsageError for anything else."""
    if isinstance(control, str):
        return preset(control)
    if not isinstance(control, Controller):
        advice = "; write Controller(law=...) for a law" if callable(control) else ""
        raise UsageError(
            f"control is {values.shown(control)}; it must be one of {', '.join(NAMES)} or a Controller{advice}."
        )
    return control


def _count(name: str, value: Any) -> int:
    """A size of at least 1, of which a machine could hold so many."""
    counted = values.whole(name, value, 1)
    return values.whole(name, counted, 1, _MOST, f"at most {_MOST}")


def _text(name: str, value: Any) -> str | Path:
    if not isinstance(value, str | Path):
        raise UsageError(f"{name} is {values.shown(value)}; it must be a text.")
    return value
