"""Flags that commands share: those of the control laws are the knobs of presets."""

import argparse

import pytest

from et_jax import evaluate, generate
from et_jax.cli import flags
from et_jax.control.presets import KNOBS, PRESETS, preset
from et_jax.io.knobs import knobs


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_control(parser, PRESETS)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_is_a_flag_that_reaches_its_preset(name):
    for chosen, one in PRESETS.items():
        if name in knobs(one):
            args = parsed("--control", chosen, f"--{name.replace('_', '-')}", "1")
            made = preset(args.control, **flags.given(args, KNOBS))
            assert vars(made.preset)[name] == 1 and type(vars(made.preset)[name]) is knobs(one)[name].kind
            assert made.preset == one(**{name: 1})


def test_what_was_not_given_is_left_to_the_preset():
    args = parsed("--control", "certified", "--tolerance", "0.2")
    assert flags.given(args, KNOBS) == {"tolerance": 0.2}


def test_a_knob_is_told_with_its_default_under_each_preset():
    assert (
        flags.knob_help("window", PRESETS) == "recent tokens always read (paper: 0; guarded, certified, adaptive: 64)"
    )
    assert flags.knob_help("tau", PRESETS).endswith("(ead, ead_guarded: 0.173)")  # 0.25 bits in nats
    parts = flags.knob_help("tolerance", PRESETS).split("; ")
    assert [part.split(" (")[1] for part in parts] == ["paper, guarded: 0.05)", "certified: 0.05)", "adaptive: 0.0001)"]


def test_caches_shrink_as_they_are_told():
    parser = argparse.ArgumentParser()
    flags.add_cache(parser.add_argument_group())
    assert flags.given(parser.parse_args([]), flags.CACHE) == {}
    args = parser.parse_args(["--cache-budget", "64", "--cache-policy", "snapkv"])
    assert flags.given(args, flags.CACHE) == {"cache_budget": 64, "cache_policy": "snapkv"}


def test_weights_are_quantised_where_a_command_says_so():
    for command in (generate, evaluate):
        required = ["--prompt", "a"] if command is generate else []
        assert command.parser().parse_args(required).quantize is None
        assert command.parser().parse_args([*required, "--quantize", "int8"]).quantize == "int8"


def test_the_dtype_of_the_cache_is_that_of_the_weights_unless_named():
    for command in (generate, evaluate):
        required = ["--prompt", "a"] if command is generate else []
        assert command.parser().parse_args(required).cache_dtype == "auto"
        assert command.parser().parse_args([*required, "--cache-dtype", "bfloat16"]).cache_dtype == "bfloat16"
