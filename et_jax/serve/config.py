"""The settings of an engine, validated in one place and passed on as one value."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from et_jax.control.compression import Compression
from et_jax.control.controller import Controller
from et_jax.control.draft import MOST_DRAFTED, DraftLength, EntropyLength, FixedLength, StopEntropy
from et_jax.control.experts import RULES, SHARES, ExpertRule
from et_jax.control.policies import POLICIES
from et_jax.control.presets import NAMES, preset
from et_jax.decode import compat
from et_jax.decode.cache.eight_bits import NAMED_8_BITS
from et_jax.decode.drafting.drafts import Drafting, Pruned, ReadSizes, by_acceptance, by_roofline, lookup, rough_times
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.io.files import expanded
from et_jax.models.weights import QUANTIZED
from et_jax.pallas.backend import NAMES as BACKENDS
from et_jax.scope import platform
from et_jax.serve.loading import min_context
from et_jax.types import replace

LOOKUP = "lookup"  # drafts from the sequence's own tokens
SELF = "self"  # the model drafts for itself; any other drafter is a second model
LOOKUP_BEFORE = "lookup+"  # prefix of another drafter, which drafts if the lookup finds no match
LENGTHS = ("acceptance", "entropy", "fixed")  # the first is the default
USUAL_POLICY = "latent"
AUTO = "auto"
CACHE_DTYPES = (AUTO, "bfloat16", "float32", *NAMED_8_BITS)  # the first is the dtype of the weights
CALIBRATIONS = (AUTO, "none")  # the first uses a stored calibration, or measures one if the control requires it
PROGRAMS = "auto"  # compiled programs are stored in the user's cache
MOST_ADAPTERS = 256  # per model
_MOST = 2**20  # of any count: no machine has memory for more

Control = str | Controller
"""A preset by name, see `presets.preset`, or a controller."""


def _decisive(default: Any) -> Any:
    """Return a field that may change a sequence's numbers, be it in the last bit."""
    return dataclasses.field(default=default, metadata={"decisive": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of `load`, which documents each of them; sizes are integers.

    None stands for the default; but `compilation_cache` None disables the compile cache, and `name` is never None.
    Raises UsageError, one sentence, for a value of another type, a value that cannot work with any model, and settings
    that are not supported together (`decode.compat`).
    """

    name: str = "bundled"
    lora: str | Path | None = None
    adapters: Mapping[str, str | Path] | None = None
    dtype: str = _decisive(AUTO)
    quantize: str | None = _decisive(None)
    cache_dtype: str = _decisive(AUTO)
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
    tensor_parallel: int = _decisive(1)
    control: Control = "off"
    draft: str | Path | None = None
    draft_tokens: int | None = None
    draft_length: str | None = None
    draft_share: float | None = None
    small: str | Path | None = dataclasses.field(default=None, metadata={"decisive": True})
    lazy_prefill: bool = False
    audit: bool = False
    trace_reads: bool = False
    cache_budget: int | Compression | None = dataclasses.field(default=None, metadata={"decisive": True})
    cache_policy: str | None = _decisive(None)
    experts: str | ExpertRule | None = dataclasses.field(default=None, metadata={"decisive": True})
    expert_share: float | None = _decisive(None)
    calibration: str = _decisive(AUTO)
    backend: str | None = _decisive(None)
    memory_fraction: float = 0.9
    compilation_cache: str | Path | None = PROGRAMS

    def __post_init__(self) -> None:
        values.fill_unset(self, but=("name", "compilation_cache"))
        checked = {
            "name": str(_text("name", self.name)),
            "dtype": str(_text("dtype", self.dtype)),
            "cache_dtype": _choice("cache_dtype", self.cache_dtype, CACHE_DTYPES),
            "calibration": _choice("calibration", self.calibration, CALIBRATIONS),
            "prefix_cache": values.boolean("prefix_cache", self.prefix_cache),
            "trace_reads": values.boolean("trace_reads", self.trace_reads),
            "preempt_every": values.integer("preempt_every", self.preempt_every, 0, wanted="0 (never) or above"),
            "control": self.control if isinstance(self.control, str) else controller(self.control),
            "memory_fraction": values.number("memory_fraction", self.memory_fraction),
        }
        for name in ("page_size", "max_model_len", "num_pages", "prefill_batch", "max_resident_seqs"):
            if getattr(self, name) is not None:
                checked[name] = _count(name, getattr(self, name))
        for name in ("max_num_seqs", "max_num_batched_tokens", "replicas", "tensor_parallel"):
            checked[name] = _count(name, getattr(self, name))
        for name in ("lora", "draft", "small"):
            if getattr(self, name) is not None:
                checked[name] = str(_text(name, getattr(self, name)))
        if self.draft in (LOOKUP_BEFORE, LOOKUP_BEFORE + LOOKUP):
            raise UsageError(
                f"draft is {self.draft}; after the plus name self or a smaller model, or take lookup alone."
            )
        other, _, last = str(self.draft).rpartition("+")
        if other and last == LOOKUP:
            raise UsageError(f"draft is {self.draft}; the lookup drafts first, so write {LOOKUP_BEFORE}{other}.")
        for name in ("lazy_prefill", "audit"):
            checked[name] = values.boolean(name, getattr(self, name))
        if self.cache_budget is not None and not isinstance(self.cache_budget, Compression):
            checked["cache_budget"] = _count("cache_budget", self.cache_budget)
        for name, choices in (("quantize", QUANTIZED), ("cache_policy", POLICIES), ("draft_length", LENGTHS)):
            if getattr(self, name) is not None:
                checked[name] = _choice(name, getattr(self, name), choices)
        if self.experts is not None and not isinstance(self.experts, ExpertRule):
            checked["experts"] = _choice("experts", self.experts, RULES)
        if self.expert_share is not None:
            checked["expert_share"] = share = values.number("expert_share", self.expert_share)
            if not 0 <= share <= 1:
                raise UsageError(f"expert_share is {share:g}; it must be a share of the gate's probability, 0 to 1.")
        if self.draft_tokens is not None:
            checked["draft_tokens"] = values.integer("draft_tokens", self.draft_tokens, 1, MOST_DRAFTED)
        if self.draft_share is not None:
            checked["draft_share"] = values.number("draft_share", self.draft_share)
            if not 0.0 < checked["draft_share"] <= 1.0:
                raise UsageError(f"draft_share is {self.draft_share:g}; it must be above 0, and 1 at most.")
        if self.adapters is not None:
            checked["adapters"] = _adapters(self.adapters)
        if self.backend is not None:
            checked["backend"] = _choice("backend", self.backend, (*BACKENDS, None))
        if self.compilation_cache not in (None, PROGRAMS):
            checked["compilation_cache"] = Path(_text("compilation_cache", self.compilation_cache))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        # a law without `sets` may depend on the model's shapes, so `sizing` checks it again once they are known
        laws = self._with_experts(controller(self.control, None))
        compat.check(self.case(laws, sets=lambda: laws.law.sets or frozenset()))

    def case(self, laws: Controller, **known: Any) -> compat.Case:
        """Return the combination to check: the settings given, `laws`, and other `known` facts (`compat.Case`)."""
        asked = self.cache_budget
        policy = asked.policy if isinstance(asked, Compression) else POLICIES[self.policy]
        return compat.Case(
            given={name: one for name, one in self.given.items() if one is not None and one is not False},
            laws=laws,
            splits=asked is not None and policy.splits,
            small_drafter=self.draft_model is not None,
            **known,
        )

    @property
    def laws(self) -> Controller:
        """The controller of `control`, with the rule for experts."""
        return self.laws_of(self.control)

    def laws_of(self, control: Control) -> Controller:
        """Return the controller of `control`, a preset's name or a controller, for JAX's current platform.

        The rule for experts is added unless the controller has its own.
        """
        return self._with_experts(controller(control, platform()))

    def with_knobs(self, control: Control | None, given: Mapping[str, Any]) -> Control | None:
        """Return the control of a call, with those knobs of its preset that are `given`.

        Knobs without a `control` apply to the preset that the engine was loaded with; without knobs `control` is
        returned unchanged. Raises UsageError for a knob that the preset lacks, and for a controller without a preset.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            return control
        named = self.control if control is None else control
        if isinstance(named, str):
            return min_context.named(named, platform(), **given)
        made = controller(named).preset
        if made is None:
            raise UsageError(
                f"{next(iter(given))} is a knob of presets, and control is a Controller that no preset made; set the "
                "numbers of its laws where it is made."
            )
        return preset(made.name, **vars(made) | given).with_experts(named.experts)

    def _with_experts(self, laws: Controller) -> Controller:
        rule = self.experts
        if isinstance(rule, str):
            share = None if rule not in SHARES else self.expert_share  # `compat` rejects it for other rules
            rule = RULES[rule](**({} if share is None else {SHARES[rule]: share}))
        return laws if rule is None or laws.experts is not None else laws.with_experts(rule)

    @property
    def policy(self) -> str:
        """The policy by which a numeric `cache_budget` ranks cache entries."""
        return self.cache_policy or USUAL_POLICY

    @property
    def drafter(self) -> str | None:
        """The drafter, without the "lookup+" before it: "lookup", "self", or a model."""
        return None if self.draft is None else str(self.draft).removeprefix(LOOKUP_BEFORE)

    @property
    def draft_model(self) -> str | None:
        """The draft model, or None."""
        return None if self.drafter in (LOOKUP, SELF) else self.drafter

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter that is merged into the model, or None."""
        return None if self.lora is None else expanded(self.lora)

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of the adapters that requests name."""
        return {name: expanded(folder) for name, folder in (self.adapters or {}).items()}

    @property
    def measures(self) -> bool:
        """Whether a stored calibration is used, and a missing one measured if the control requires it."""
        return self.calibration == AUTO

    @property
    def others(self) -> tuple[str, ...]:
        """The names of second models: a draft model, or a small model that alternates with the loaded one."""
        return tuple(str(one) for one in (self.draft_model, self.small) if one is not None)

    @property
    def most_drafted(self) -> int:
        """The most tokens drafted per sequence and step, if drafting is enabled."""
        return Drafting.most if self.draft_tokens is None else self.draft_tokens

    def drafting(self, batch: int, sizes: ReadSizes, drafter_cost: float = 0.0) -> Drafting | None:
        """Return how tokens are drafted, None without drafting. Steps have `batch` rows plus the drafted ones.

        A drafted token costs the share `drafter_cost` of a model step (0: no draft model), which reads `sizes` bytes.
        """
        if self.draft is None:
            return None
        most, sequences = self.most_drafted, self.max_num_seqs
        pruned = Pruned() if self.draft_share is None else Pruned(share=self.draft_share)
        drafter = {LOOKUP: lookup, SELF: pruned}.get(str(self.drafter))
        passing, share = (1.0, pruned.share) if drafter is pruned else (drafter_cost, drafter_cost)
        times = rough_times(batch, sizes, passing, share)
        by_time = by_roofline(most, batch, times) if drafter is pruned else None
        usual = by_time or by_acceptance(most, sequences, batch, drafter_cost)
        before = None
        if self.drafter != self.draft:
            looked_up = by_acceptance(most, sequences, batch)
            if by_time is not None:  # both drafters use the same widths
                looked_up = replace(looked_up, widths=by_time.widths)
            before = Drafting(most=most, length=self._length(looked_up, EntropyLength()), drafter=lookup)
        return Drafting(
            most=most,
            length=self._length(usual, EntropyLength() if drafter is lookup else StopEntropy()),
            drafter=drafter,
            before=before,
            times=times if self.draft_length in (None, LENGTHS[0]) else None,
        )

    def _length(self, usual: DraftLength, by_certainty: DraftLength) -> DraftLength:
        """Return the law of draft lengths that `draft_length` names."""
        return {"entropy": by_certainty, "fixed": FixedLength()}.get(self.draft_length or "", usual)

    @property
    def given(self) -> dict[str, Any]:
        """Every setting by its name, as `load` receives it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that may change a sequence; with the model and the control they determine it."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata}
        if self.cache_dtype == AUTO:
            del named["cache_dtype"]  # it equals `dtype`
        if self.measures:
            del named["calibration"]
        if self.tensor_parallel == 1:
            del named["tensor_parallel"]
        if self.experts is None:
            del named["experts"], named["expert_share"]
        return named | {"cache_policy": self.policy}


def controller(control: Control, platform: str | None = None) -> Controller:
    """Return the controller of a preset's name or a controller. Raises UsageError for anything else.

    A preset by name selects blocks from the length on at which this saves time on `platform` (`min_context.usual`);
    without a platform, at every length.
    """
    if isinstance(control, str):
        return preset(control) if platform is None else min_context.named(control, platform)
    if not isinstance(control, Controller):
        advice = "; write Controller(law=...) for a law" if callable(control) else ""
        raise UsageError(
            f"control is {values.shown(control)}; it must be one of {', '.join(NAMES)} or a Controller{advice}."
        )
    return control


def _adapters(given: Any) -> dict[str, str]:
    """Return the folders of adapters by name."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise UsageError(f"adapters is {values.shown(given)}; it must map names to folders of adapters.")
    if len(given) > MOST_ADAPTERS:
        raise UsageError(f"adapters has {len(given)} entries; it may have {MOST_ADAPTERS} at most.")
    return {name: str(_text(f"adapters[{name}]", folder)) for name, folder in given.items()}


def _count(name: str, value: Any) -> int:
    """Return a size from 1 to `_MOST`."""
    counted = values.integer(name, value, 1)
    return values.integer(name, counted, 1, _MOST, f"at most {_MOST}")


def _choice(name: str, value: Any, choices: Collection[str | None]) -> str:
    if not isinstance(value, str) or value not in choices:
        none = " or None" if None in choices else ""
        raise UsageError(f"{name} is {values.shown(value)}; choose one of {', '.join(filter(None, choices))}{none}.")
    return str(value)


def _text(name: str, value: Any) -> str | Path:
    if not isinstance(value, str | Path):
        raise UsageError(f"{name} is {values.shown(value)}; it must be a text.")
    return value
