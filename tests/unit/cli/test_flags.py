"""Flags that commands share: those of the control laws are the knobs of presets."""

import argparse

import pytest

from et_jax import generate
from et_jax.cli import flags
from et_jax.control.presets import KNOBS, PRESETS, preset
from et_jax.errors import UsageError
from et_jax.io.knobs import knobs


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_is_a_flag_that_reaches_its_preset(name):
    parser = argparse.ArgumentParser()
    flags.add_control(parser, PRESETS)
    for chosen, one in PRESETS.items():
        if name in knobs(one):
            args = parser.parse_args(["--control", chosen, f"--{name.replace('_', '-')}", "1"])
            assert flags.given(args, KNOBS) == {name: 1}  # and nothing that was not given
            made = preset(args.control, **flags.given(args, KNOBS))
            assert vars(made.preset)[name] == 1 and type(vars(made.preset)[name]) is knobs(one)[name].kind
            assert made.preset == one(**{name: 1})


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (("--n", "2"), "--n is 2; a chat has one answer to a turn."),
        (("--best-of", "3"), "--best-of is 3; a chat has one answer to a turn."),
        (("--json",), "--json is not for --interactive; /save and /trace are there."),
    ],
)
def test_a_chat_refuses_what_is_for_prompts(flag, sentence):
    with pytest.raises(UsageError) as refusal:
        flags.check_combination(generate.parser().parse_args(["--interactive", *flag]))
    assert str(refusal.value) == sentence
