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
            assert flags.given(args, KNOBS) == {name: 1}  # and nothing that was not given
            made = preset(args.control, **flags.given(args, KNOBS))
            assert vars(made.preset)[name] == 1 and type(vars(made.preset)[name]) is knobs(one)[name].kind
            assert made.preset == one(**{name: 1})


def test_both_commands_take_the_form_of_weights_and_caches():
    given = ["--cache-budget", "64", "--cache-policy", "snapkv", "--quantize", "int8", "--cache-dtype", "bfloat16"]
    for command, required in ((generate, ["--prompt", "a"]), (evaluate, [])):
        plain, args = (command.parser().parse_args([*required, *others]) for others in ([], given))
        assert flags.given(plain, flags.CACHE) == {} and (plain.quantize, plain.cache_dtype) == (None, "auto")
        assert flags.given(args, flags.CACHE) == {"cache_budget": 64, "cache_policy": "snapkv"}
        assert (args.quantize, args.cache_dtype) == ("int8", "bfloat16")
