"""Flags of the control laws: those of a preset, and no others."""

import argparse
import inspect

from et_jax import evaluate, generate
from et_jax.cli import flags
from et_jax.control.presets import preset


def test_the_knobs_are_those_of_a_preset():
    taken = [name for name, given in inspect.signature(preset).parameters.items() if given.default is None]
    assert set(flags.CONTROL) <= set(taken)


def test_caches_shrink_as_they_are_told():
    parser = argparse.ArgumentParser()
    flags.add_cache(parser.add_argument_group())
    assert flags.given(parser.parse_args([]), flags.CACHE) == {}
    args = parser.parse_args(["--cache-budget", "64", "--cache-policy", "snapkv"])
    assert flags.given(args, flags.CACHE) == {"cache_budget": 64, "cache_policy": "snapkv"}


def test_the_dtype_of_the_cache_is_that_of_the_weights_unless_named():
    for command in (generate, evaluate):
        required = ["--prompt", "a"] if command is generate else []
        assert command.parser().parse_args(required).cache_dtype == "auto"
        assert command.parser().parse_args([*required, "--cache-dtype", "bfloat16"]).cache_dtype == "bfloat16"


def test_what_was_not_given_is_left_to_the_preset():
    parser = argparse.ArgumentParser()
    flags.add_control(parser)
    args = parser.parse_args(["--control", "certified", "--tolerance", "0.2"])
    assert {name: given for name, given in flags.knobs(args).items() if given is not None} == {"tolerance": 0.2}
    preset(args.control, **flags.knobs(args))  # which takes them as they are
