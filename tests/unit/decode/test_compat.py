"""What goes with what: every row of the table is met, and no setting that is taken does nothing."""

import itertools
from typing import Any

import jax.numpy as jnp
import pytest
from small_model import LENGTH, MODEL, OTHER

from et_jax.control import refresh
from et_jax.control.budget import ConstantBudget, EntropyBudget
from et_jax.control.compression import named
from et_jax.control.contribution import token_nll
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.select import ActiveSet, Certified, Guarded, Quest
from et_jax.control.switch import AsPrinted
from et_jax.decode import compat
from et_jax.decode.config import DecoderConfig
from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import beside, decoder_config
from et_jax.types import replace

LAW = ConstantBudget(tokens=16, segment=16, dense_until=16)
SETS_TOLERANCE = Controller(law=lambda signals, state: replace(state, tolerance=0.1 * signals.entropy))
SETS_HEAT = Controller(law=lambda signals, state: replace(state, temperature=0.1 + signals.entropy))


def sized(**settings: Any) -> DecoderConfig:
    """The configuration of the decoder of a small model, and of a smaller one where two are named."""
    given = EngineConfig(**{"page_size": 4, "backend": "xla"} | settings)
    return decoder_config(given, MODEL, jnp.float32, others=(OTHER,) * len(given.others))


TURNS = {"control": "ead", "small": "bundled-small"}
REFUSED = [
    ({"draft": "bundled-small", "control": "ead"}, "draft is for one model, and this control has two take turns;"),
    ({"draft": "lookup", "small": "bundled-small"}, "draft is for one model, and small for two that take turns;"),
    ({"draft": "lookup", "control": "paper"}, "draft guesses tokens ahead, and under this control one token decides"),
    ({"draft": "lookup", "control": SETS_TOLERANCE}, "draft guesses tokens ahead"),
    ({"draft": "lookup", "control": Controller(selector=Quest(2), law=refresh.Every(4))}, "draft guesses tokens ahead"),
    ({"draft_tokens": 8}, "draft_tokens is for drafts; set draft to lookup, to self, or to a smaller model."),
    ({"draft_length": "fixed"}, "draft_length is for drafts; set draft to lookup, to self, or to a smaller model."),
    ({"draft": "lookup", "draft_share": 0.1}, "draft_share is for a model that drafts for itself; set draft to self."),
    ({"draft": "lookup", "experts": "entropy"}, "draft guesses tokens ahead, and under this rule for experts one tok"),
    ({"expert_share": 0.5}, "expert_share is a number of expert rules; set experts to mass or entropy."),
    ({"experts": "mass"}, "A rule for experts requires a mixture of experts, and this model is not one; leave"),
    ({"control": "ead"}, "This control switches between two models; name the other one by small."),
    ({**TURNS, "control": Controller(switch=AsPrinted(1.0), budget=LAW)}, "This control has a prefill budget and swi"),
    ({**TURNS, "control": Controller(switch=AsPrinted(1.0), selector=ActiveSet(token_nll))}, "This control switches"),
    ({"small": "bundled-small"}, "small is for two models that take turns; set control to ead or ead_guarded."),
    ({"lazy_prefill": True}, "lazy_prefill is for two models that take turns; set control to ead or ead_guarded."),
    ({"audit": True}, "audit is for two models that take turns, and for prompts read in part; set control to ead, "),
    ({"cache_policy": "latent"}, "cache_policy selects what a cache_budget keeps; set that too, to a number"),
    ({"cache_policy": "latent", "cache_budget": named("latent", 36)}, "cache_budget is a Compression, which has"),
    ({"cache_budget": 36, "draft": "bundled-small"}, "cache_budget drops entries of a second model in the same pages"),
    ({"cache_budget": 36, **TURNS}, "cache_budget drops entries of a second model in the same pages, and small names"),
    ({"cache_budget": 36, "control": Controller(selector=Quest(2), law=refresh.Every(2))}, "cache_budget drops tokens"),
    ({"control": Controller(selector=Quest(2), law=refresh.Every(2), residual=True)}, "This control keeps"),
    ({"control": Controller(selector=Guarded(Certified()), law=refresh.Every(2))}, "This control keeps a selection"),
    ({"cache_budget": 36, "control": Controller(selector=ActiveSet(token_nll))}, "cache_budget drops tokens that"),
    ({"cache_budget": 36, "cache_policy": "adakv", "control": "certified"}, "This control selects blocks, and the pol"),
    ({"cache_budget": LENGTH}, "cache_budget keeps 64 tokens and max_model_len is 64, so that nothing would ever"),
    ({"cache_budget": 36, "cache_policy": "adakv"}, "cache_budget keeps 72 tokens and max_model_len is 64"),
    ({"tensor_parallel": 2, "control": Controller(budget=EntropyBudget(shared=True))}, "The heads of a layer share"),
    ({"prefill_batch": 64, "control": "entropyinfer"}, "prefill_batch is 64, and this control reads full segments"),
]


def test_every_row_refuses_in_one_sentence(monkeypatch):
    unmet = set(compat.TABLE)
    described = compat.Row.described

    def met(row, case, spelled):
        unmet.discard(row)
        return described(row, case, spelled)

    monkeypatch.setattr(compat.Row, "described", met)
    for settings, sentence in REFUSED:
        with pytest.raises(UsageError) as caught:
            sized(**settings)
        refused = caught.value
        assert str(refused).startswith(sentence), (settings, str(refused))
        assert str(refused).endswith(".") and "\n" not in str(refused) and "{" not in str(refused)
        first, of_flags = str(refused).split()[0], refused.on_command_line.split()[0]
        assert of_flags == ("--" + first.replace("_", "-") if first in settings else first)
    assert not unmet


def test_a_control_for_one_call_meets_the_same_table_but_may_leave_idle_what_serves_others():
    plain = {"page_size": 4, "backend": "xla"}
    for settings, control, sentence in (
        ({"draft": "bundled-small"}, preset("ead"), "^draft is for one model"),
        ({"draft": "bundled-small"}, preset("paper"), "^draft guesses"),
        ({"draft": "bundled-small"}, SETS_TOLERANCE, "^draft guesses"),
        ({"cache_budget": 36}, Controller(selector=Quest(2), law=refresh.Every(2)), "^cache_budget drops tokens"),
    ):
        with pytest.raises(UsageError, match=sentence):
            beside(EngineConfig(**plain | settings), sized(**settings), control, (OTHER,) * ("draft" in settings))
    turning = {"lazy_prefill": True, "audit": True} | TURNS
    alone = beside(EngineConfig(**plain | turning), sized(**turning), Controller(), (OTHER,))
    assert not alone.others and not alone.lazy and not alone.audit
    assert sized(draft="lookup", control=SETS_HEAT).draft is not None  # a law of one's own that sets no reading


ONE_OF_EACH = {
    "page_size": [8],
    "max_model_len": [48],
    "num_pages": [40],
    "max_num_seqs": [5],
    "max_resident_seqs": [9],
    "prefill_batch": [16],
    "control": ["paper", "certified", "ead", "entropyinfer", Controller(budget=LAW)],
    "draft": ["lookup", "self", "bundled-small"],
    "draft_tokens": [3],
    "draft_length": ["entropy", "fixed"],
    "draft_share": [0.2],
    "small": ["bundled-small"],
    "lazy_prefill": [True],
    "audit": [True],
    "trace_reads": [True],
    "cache_budget": [40, named("random", 40)],
    "cache_policy": ["snapkv", "streaming", "pyramidkv"],
}


def shaped(settings: dict[str, Any]) -> DecoderConfig | None:
    try:
        return sized(**settings)
    except UsageError as error:
        assert "\n" not in str(error)
        return None


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_is_taken_together_has_an_effect(most):
    """Some settings: where a decoder is made of them, it is another one without any of them, or there is none."""
    choices = [(name, one) for name, some in ONE_OF_EACH.items() for one in some]
    made: dict[frozenset[int], DecoderConfig | None] = {}
    for count in range(most + 1):
        for chosen in itertools.combinations(range(len(choices)), count):
            settings = dict(choices[i] for i in chosen)
            if len(settings) < count:
                continue
            made[frozenset(chosen)] = found = shaped(settings)
            for i in chosen if found is not None else ():
                assert made[frozenset(chosen) - {i}] != found, f"{choices[i][0]} does nothing beside {settings}"
