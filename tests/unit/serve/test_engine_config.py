"""The settings of an engine: one list, each refused in one sentence, and from which length a preset chooses."""

import dataclasses
import inspect

import jax
import pytest

from et_jax import generate
from et_jax.cli import flags
from et_jax.commands.settings import engine
from et_jax.control.controller import Controller
from et_jax.control.experts import Mass
from et_jax.control.presets import PRESETS, preset
from et_jax.errors import UsageError
from et_jax.io.knobs import knobs
from et_jax.serve.config import EngineConfig, controller
from et_jax.serve.engine import load
from et_jax.serve.loading import min_context
from et_jax.serve.loading.min_context import MEASURED, NEVER, named, usual
from et_jax.serve.requests import GenerationRequest

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def test_load_takes_every_setting_under_its_name_with_its_default():
    others = {"progress", "config", "tokenizer"}  # the last two are a module's, which is no setting either
    taken = {name: given.default for name, given in inspect.signature(load).parameters.items() if name not in others}
    assert taken == {field.name: field.default for field in dataclasses.fields(EngineConfig)}


WRITE_FIRST = "draft is self+lookup; the lookup drafts first, so write lookup+self."
NO_TOLERANCE = "has no tolerance; choose one of paper, guarded, certified, adaptive, share to set it."
NO_PRESET = "window is a knob of presets, and control is a Controller that no preset made"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EngineConfig(preempt_every=-1), "preempt_every is -1; it must be 0 (never) or above."),
        (lambda: EngineConfig(prefix_cache=1), "prefix_cache is 1; it must be true or false."),  # pyright: ignore
        (lambda: EngineConfig(quantize="int4"), 'quantize is "int4"; choose one of int8.'),
        (lambda: EngineConfig(backend="cuda"), 'backend is "cuda"; choose one of'),
        (lambda: EngineConfig(control=lambda signals, state: state), "write Controller(law=...) for a law."),
        (lambda: EngineConfig(draft="lookup", draft_length="long"), 'long"; choose one of acceptance, entropy, fixed.'),
        (lambda: EngineConfig(draft_tokens=17), "draft_tokens is 17"),
        (lambda: EngineConfig(draft="self+lookup"), WRITE_FIRST),
        (lambda: EngineConfig(draft="lookup+"), "draft is lookup+; after the plus name self or a smaller model"),
        (lambda: GenerationRequest(prompt="It was", draft_tokens=17), "draft_tokens"),
        (lambda: GenerationRequest(prompt="It was", adapter=1), "adapter is 1; it must be the name"),  # pyright: ignore
        (lambda: EngineConfig(adapters=["a"]), "adapters is a list; it must map names to folders"),  # pyright: ignore
        (lambda: flags.adapters(["a=b", "a=c"]), "--adapter is a=c; write a name of its own and a folder"),
        (lambda: flags.adapters(["a"]), "--adapter is a; write a name of its own and a folder"),
        (lambda: load(dtype="int8"), "dtype int8 is not supported"),
        (lambda: load(max_num_seqs=2**20), "This needs"),
        (lambda: load(progress=5), "progress is 5; it must be a function of one text."),  # pyright: ignore
        (lambda: EngineConfig().with_knobs(None, {"tolerance": 0.1}), NO_TOLERANCE),
        (lambda: EngineConfig().with_knobs(Controller(), {"window": 8}), NO_PRESET),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(make, said):
    with pytest.raises(UsageError) as refused:
        make()
    assert said in str(refused.value) and str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_what_may_change_a_text_is_in_the_manifest_of_a_batch_and_no_more():
    changes = {"dtype", "quantize", "page_size", "max_model_len", "max_num_seqs", "prefill_batch", "small", "backend"}
    changes |= {"cache_budget", "cache_policy"}
    assert EngineConfig(max_num_seqs=4).decisive.keys() == changes
    assert EngineConfig(cache_dtype="bfloat16").decisive == EngineConfig().decisive | {"cache_dtype": "bfloat16"}
    assert EngineConfig(quantize="int8").decisive == EngineConfig().decisive | {"quantize": "int8"}
    assert EngineConfig(num_pages=9, replicas=2, max_num_batched_tokens=7).decisive == EngineConfig().decisive


def test_the_command_line_fills_in_what_it_has():
    def settings(*more: str) -> EngineConfig:
        return engine(generate.parser().parse_args(["--prompt", "a", *more]), 5, preset("off"))

    asked = settings("--page-size", "32", "--replicas", "2", "--max-num-batched-tokens", "64")
    expected = {"page_size": 32, "replicas": 2, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    assert asked == EngineConfig(**expected, control=preset("off"))
    assert settings("--max-num-seqs", "3") == EngineConfig(max_num_seqs=3, control=preset("off"))


def test_a_setting_or_a_knob_that_is_none_is_not_set():
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("name", "compilation_cache"):  # None is no name, and no folder
            assert EngineConfig(**{field.name: None}) == EngineConfig(), field.name
    assert EngineConfig(compilation_cache=None).compilation_cache is None
    for one in PRESETS.values():
        assert one(**dict.fromkeys(knobs(one))) == one()


def test_a_call_sets_the_knobs_of_the_preset_it_names_or_the_model_has():
    usual, loaded = EngineConfig(), EngineConfig(control=preset("paper", window=8, tolerance=0.2))
    least = min_context.usual("certified", "cpu")
    assert usual.with_knobs("certified", {"tolerance": 0.3}) == preset("certified", tolerance=0.3, min_context=least)
    assert usual.with_knobs("ead", {"tau": 1, "tolerance": None}) == preset("ead", tau=1)
    adaptive = EngineConfig(control="adaptive").with_knobs(None, {"window": 9, "min_context": 0})
    assert adaptive == preset("adaptive", window=9)
    assert loaded.with_knobs(None, {"tolerance": 0.3}) == preset("paper", window=8, tolerance=0.3)
    given = preset("certified", min_blocks=5).with_experts(Mass())
    changed = usual.with_knobs(given, {"window": 9})
    assert changed == preset("certified", min_blocks=5, window=9).with_experts(Mass())
    for control in (None, "paper", given):
        assert loaded.with_knobs(control, {"tolerance": None}) is control


CHOOSING = [name for name, one in PRESETS.items() if "min_context" in knobs(one)]


def test_every_preset_that_chooses_is_measured_on_a_cpu_and_no_other_is():
    assert sorted(MEASURED["cpu"]) == sorted(CHOOSING) == ["adaptive", "certified", "guarded", "paper", "share"]
    assert all(0 < least <= NEVER for least in MEASURED["cpu"].values())


@pytest.mark.parametrize("name", CHOOSING)
def test_a_named_preset_has_what_was_measured_unless_it_is_told(name):
    assert named(name, "cpu", tolerance=0.5) == preset(name, tolerance=0.5, min_context=MEASURED["cpu"][name])
    assert named(name, "cpu", min_context=None).min_context == MEASURED["cpu"][name]
    assert named(name, "cpu", min_context=0) == preset(name)
    assert named(name, "cpu", min_context=7).min_context == 7
    assert jax.tree.structure(named(name, "cpu", min_context=0)) == jax.tree.structure(preset(name))


def test_blocks_are_always_chosen_where_nothing_was_measured_and_by_a_preset_that_is_given():
    for platform in ("gpu", "tpu", "unheard-of"):
        assert usual("certified", platform) == 0 and named("certified", platform) == preset("certified")
    given = preset("certified", tolerance=0.1)
    assert controller(given, "cpu") is given and EngineConfig(control=given).laws is given
    assert named("ead", "cpu", tau=0.5) == preset("ead", tau=0.5)
    assert named("off", "cpu") == preset("off") == Controller()
