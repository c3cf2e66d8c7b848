"""One table of settings and laws that cannot work together, and the sentence of each refusal.

It checks the settings of an engine, of a decoder's configuration, and of a control given for one call.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from et_jax.control.controller import Controller
from et_jax.control.experts import SHARES
from et_jax.control.selector import Selector
from et_jax.decode.fresh import READING
from et_jax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Given settings, by their names in `load`, and the laws that run under them.

    `sets` returns the fields of the control state that the law sets, and is called only if it matters. Selectors have
    the `needs`, besides those of the laws. In a compressed cache, heads keep different numbers of entries if it
    `splits`, and at most `room` entries; a slot has `length` tokens. Drafts may be those of a `small_drafter`,
    the model may be a `mixture` of experts. None means unknown.
    """

    given: Mapping[str, Any]
    laws: Controller
    sets: Callable[[], frozenset[str]]
    num_layers: int | None = None
    mixture: bool | None = None
    needs: frozenset[str] = frozenset()
    splits: bool = False
    small_drafter: bool = False
    room: int | None = None
    length: int | None = None

    def has(self, *names: str) -> bool:
        """Return whether any of these settings was given."""
        return not self.given.keys().isdisjoint(names)

    @property
    def parallel(self) -> bool:
        """Whether the model is split over several devices."""
        return self.given.get("tensor_parallel", 1) > 1

    @property
    def switches(self) -> bool:
        """Whether two models take turns."""
        return self.laws.switch is not None

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors of all layers; if the model is unknown, each distinct one."""
        return self.laws.selectors(self.num_layers or self.laws.dense_layers + 1)

    def uses(self, need: str) -> bool:
        """Return whether a selector needs this."""
        return need in self.needs.union(*(selector.needs for selector in self.selectors))

    @property
    def steers(self) -> bool:
        """Whether the observations of one token decide what the next token reads.

        Surprisals of a token affect only reads after the end of its block, and no draft extends that far.
        """
        return self.uses("masses") or not READING.isdisjoint(self.sets())

    @property
    def chooses(self) -> bool:
        """Whether any layer selects blocks."""
        return not all(selector.reads_all for selector in self.selectors)


@dataclasses.dataclass(frozen=True)
class Row:
    """A `clash` of settings and laws, and the `sentence` that refuses it, with the names of settings in braces.

    An `idle` setting does no harm: it is refused when everything is set, but not for a control given for one call,
    which need not use what the others use.
    """

    clash: Callable[[Case], bool]
    sentence: str
    idle: bool = False

    def described(self, case: Case, spelled: Callable[[str], str]) -> str:
        """Return the sentence, with each setting `spelled` as the caller gave it."""
        return self.sentence.format(case=case, **{name: spelled(name) for name in _NAMES})


_NAMES = (
    *("control", "draft", "draft_tokens", "draft_length", "draft_share", "small", "lazy_prefill", "audit"),
    *("cache_budget", "cache_policy", "prefill_batch", "max_model_len", "experts", "expert_share", "tensor_parallel"),
)

TABLE = (
    Row(
        lambda c: c.has("draft") and c.switches,
        "{draft} is for one model, and this control has two take turns; leave {draft} out, or choose another "
        "control ({small} names the model that takes turns).",
    ),
    Row(
        lambda c: c.has("draft") and c.has("small"),
        "{draft} is for one model, and {small} for two that take turns; leave one of them out.",
    ),
    Row(
        lambda c: c.has("draft") and c.steers,
        "{draft} guesses tokens ahead, and under this control one token decides what the next reads; leave {draft} "
        "out, or choose off, certified, or adaptive that selects at every token.",
    ),
    Row(
        lambda c: c.has("draft") and c.laws.experts is not None and c.laws.experts.by_entropy,
        "{draft} guesses tokens ahead, and under this rule for {experts} one token decides the experts of the next; "
        "leave {draft} out, or choose mass.",
    ),
    Row(
        lambda c: c.has("expert_share") and c.given.get("experts") not in SHARES,
        "{expert_share} is a number of expert rules; set {experts} to mass or entropy.",
    ),
    Row(
        lambda c: c.laws.experts is not None and c.mixture is False,
        "A rule for experts requires a mixture of experts, and this model is not one; leave {experts} out.",
    ),
    *(
        Row(
            lambda c, name=name: c.has(name) and not c.has("draft"),
            f"{{{name}}} is for drafts; set {{draft}} to lookup, to self, or to a smaller model.",
        )
        for name in ("draft_tokens", "draft_length")
    ),
    Row(
        lambda c: c.has("draft_share") and str(c.given.get("draft")).removeprefix("lookup+") != "self",
        "{draft_share} is for a model that drafts for itself; set {draft} to self.",
    ),
    Row(
        lambda c: c.switches and c.laws.budget is not None,
        "This control has a prefill budget and switches between two models; take one of them.",
    ),
    Row(
        lambda c: c.switches and not c.has("small"),
        "This control switches between two models; name the other one by {small}.",
    ),
    Row(
        lambda c: c.switches and c.uses("surprisals"),
        "This control switches between two models and uses surprisals, which a model that lags behind lacks; choose "
        "another selector.",
    ),
    *(
        Row(
            lambda c, name=name: c.has(name) and not c.switches,
            f"{{{name}}} is for two models that take turns; set {{control}} to ead or ead_guarded.",
            idle=True,
        )
        for name in ("small", "lazy_prefill")
    ),
    Row(
        lambda c: c.has("audit") and not c.switches and c.laws.budget is None,
        "{audit} is for two models that take turns, and for prompts read in part; set {control} to ead, ead_guarded or "
        "entropyinfer.",
        idle=True,
    ),
    Row(
        lambda c: c.has("cache_policy") and not c.has("cache_budget"),
        "{cache_policy} selects what a {cache_budget} keeps; set that too, to a number of tokens.",
    ),
    Row(
        lambda c: c.has("cache_policy") and not isinstance(c.given["cache_budget"], int),
        "{cache_budget} is a Compression, which has its own policy; leave out {cache_policy}.",
    ),
    Row(
        lambda c: c.has("cache_budget") and c.small_drafter,
        "{cache_budget} drops entries of a second model in the same pages, and {draft} names one; leave out one or the "
        "other, or set {draft} to lookup, to self or to lookup+self.",
    ),
    Row(
        lambda c: c.has("cache_budget") and c.has("small"),
        "{cache_budget} drops entries of a second model in the same pages, and {small} names one; leave out one or the "
        "other.",
    ),
    Row(
        lambda c: c.has("cache_budget") and (c.uses("surprisals") or "refresh" in c.sets()),
        "{cache_budget} drops tokens that this control uses; leave it out, or choose another control.",
    ),
    Row(
        lambda c: any(selector.proves for selector in c.selectors) and "refresh" in c.sets(),
        "This control keeps a selection for several tokens, and its proof holds for one query; choose another "
        "selector, or leave out the law of refresh.",
    ),
    Row(
        lambda c: c.laws.residual and "refresh" in c.sets(),
        "This control keeps a selection for several tokens, and its residual holds for one query; set residual=False, "
        "or leave out the law of refresh.",
    ),
    Row(
        lambda c: c.splits and c.chooses,
        "This control selects blocks, and the policy of {cache_budget} lets heads keep different numbers of them; "
        "choose latent, or another control.",
    ),
    Row(
        lambda c: c.room is not None and c.length is not None and c.room >= c.length,
        "{cache_budget} keeps {case.room} tokens and {max_model_len} is {case.length}, so that nothing would ever be "
        "dropped; lower {cache_budget}, or leave it out.",
    ),
    Row(
        lambda c: c.parallel and c.laws.budget is not None and c.laws.budget.compares_heads,
        "The heads of a layer share this prefill budget, and devices hold different heads; leave {tensor_parallel} "
        "out, or take a budget for each head.",
    ),
    Row(
        lambda c: (
            c.laws.budget is not None and c.given.get("prefill_batch", c.laws.budget.segment) < c.laws.budget.segment
        ),
        "{prefill_batch} is {case.given[prefill_batch]}, and this control reads full segments of "
        "{case.laws.budget.segment} tokens; leave {prefill_batch} out, or raise it.",
    ),
)
"""The first row that clashes is reported."""


def check(case: Case, *, for_one_call: bool = False) -> None:
    """Raise UsageError, one sentence, if settings and laws exclude each other."""
    for row in TABLE:
        if not (for_one_call and row.idle) and row.clash(case):
            raise UsageError(row.described(case, str), on_command_line=row.described(case, flag))


def flag(name: str) -> str:
    """Return the command line's name of a setting."""
    return f"--{name.replace('_', '-')}"
