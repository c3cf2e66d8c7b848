"""The settings of an engine: one list of them, each refused in one sentence, those that may change a text named."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from et_jax import generate
from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig
from et_jax.serve.engine import load

SIZES = ("page_size", "max_model_len", "num_pages", "max_num_seqs", "max_resident_seqs", "prefill_batch", "replicas")


pytestmark = pytest.mark.usefixtures("as_users_have_it")


def test_load_takes_every_setting_under_its_name_with_its_default():
    others = {"progress", "config", "tokenizer"}  # the last two are a module's, which is no setting either
    taken = {name: given.default for name, given in inspect.signature(load).parameters.items() if name not in others}
    assert taken == {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def test_what_was_given_makes_the_same_settings_again():
    one = EngineConfig(max_num_seqs=3, name=Path("a/b"), control="guarded", compilation_cache="here")  # type: ignore[arg-type]
    assert EngineConfig(**one.given) == one
    assert (one.name, one.control, one.compilation_cache) == ("a/b", "guarded", Path("here"))


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_cannot_be_is_named(name):
    given = {0: "0; it must be at least 1.", 2**21: "2097152; it must be at most 1048576.", 1.5: "1.5; it must be a"}
    given |= {"8": '"8"; it must be a whole number.', True: "true; it must be a whole number."}
    for value, said in given.items():
        with pytest.raises(UsageError) as refused:
            EngineConfig(**{name: value})
        assert str(refused.value).startswith(f"{name} is {said}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preempt_every": None}, "preempt_every is None; it must be a whole number."),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan; it must be a finite number."),
        ({"name": None}, "name is None; it must be a text."),
        ({"dtype": 5}, "dtype is 5; it must be a text."),
        ({"preempt_every": -1}, "preempt_every is -1; it must be 0 (never) or above."),
        ({"prefix_cache": 1}, "prefix_cache is 1; it must be true or false."),
        ({"tell_reads": "yes"}, 'tell_reads is "yes"; it must be true or false.'),
        ({"memory_fraction": "all"}, 'memory_fraction is "all"; it must be a number.'),
        ({"name": 3}, "name is 3; it must be a text."),
        ({"cache_dtype": "int4"}, 'cache_dtype is "int4"; choose one of auto, bfloat16, float32, int8, fp8.'),
        ({"cache_dtype": None}, "cache_dtype is None; choose one of auto, bfloat16, float32, int8, fp8."),
        ({"quantize": "int4"}, 'quantize is "int4"; choose one of int8.'),
        ({"quantize": True}, "quantize is true; choose one of int8."),
        ({"backend": "cuda"}, 'backend is "cuda"; choose one of'),
        ({"control": 3}, "control is 3; it must be one of"),
        ({"control": lambda signals, state: state}, "write Controller(law=...) for a law."),
        ({"compilation_cache": 5}, "compilation_cache is 5; it must be a text."),
    ],
)
def test_a_value_that_cannot_be_is_told_in_one_sentence(settings, said):
    with pytest.raises(UsageError) as refused:
        EngineConfig(**settings)
    assert said in str(refused.value) and str(refused.value).endswith(".")


def test_what_may_change_a_text_is_in_the_manifest_of_a_batch_and_no_more():
    changes = {
        "dtype",
        "quantize",
        "page_size",
        "max_model_len",
        "max_num_seqs",
        "prefill_batch",
        "small",
        "cache_budget",
        "cache_policy",
        "backend",
    }
    assert EngineConfig(max_num_seqs=4).decisive.keys() == changes
    assert EngineConfig(cache_dtype="bfloat16").decisive == EngineConfig().decisive | {"cache_dtype": "bfloat16"}
    assert EngineConfig(quantize="int8").decisive == EngineConfig().decisive | {"quantize": "int8"}
    assert EngineConfig(num_pages=9, replicas=2, max_num_batched_tokens=7).decisive == EngineConfig().decisive


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "int8"}, "dtype int8 is not supported"),
        ({"max_num_seqs": 2**20}, "This needs"),
        ({"memory_fraction": 2}, "memory_fraction is 2"),
        ({"progress": 5}, "progress is 5; it must be a function of one text."),
    ],
)
def test_what_loading_alone_finds_is_told_in_one_sentence(settings, said):
    with pytest.raises(UsageError) as refused:
        load(**settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_line_fills_in_what_it_has():
    def settings(*more: str) -> EngineConfig:
        return generate._engine(generate.parser().parse_args(["--prompt", "a", *more]), 5, preset("off"))

    asked = settings("--page-size", "32", "--replicas", "2", "--max-num-batched-tokens", "64")
    expected = {"page_size": 32, "replicas": 2, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    assert asked == EngineConfig(**expected, control=preset("off"))
    assert settings("--max-num-seqs", "3") == EngineConfig(max_num_seqs=3, control=preset("off"))
