"""Flags of the control laws: those of a preset, and no others."""

import argparse
import inspect

import pytest

from et_jax.cli import flags
from et_jax.control.presets import preset
from et_jax.errors import UsageError


def test_the_knobs_are_those_of_a_preset():
    taken = [name for name, given in inspect.signature(preset).parameters.items() if given.default is None]
    assert set(flags.CONTROL) <= set(taken)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--small", "bundled-small"], "--small is for two models that take turns; add --control ead"),
        (["--audit"], "--audit is for two models that take turns"),
        (["--control", "ead", "--small", "bundled-small", "--draft", "lookup"], "--draft is for one model"),
    ],
)
def test_flags_of_two_models_need_a_control_that_switches(given, sentence):
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft")
    flags.add_control(parser)
    args = parser.parse_args(given)
    with pytest.raises(UsageError, match=sentence):
        flags.check_small(args, preset(args.control).switch is not None)


@pytest.mark.parametrize("given", [{"draft_tokens": 4}, {"draft_length": "fixed"}])
def test_what_is_said_of_drafts_needs_drafts(given):
    nothing = {"draft": None, "draft_tokens": None, "draft_length": None}
    flags.check_draft(argparse.Namespace(**nothing))
    flags.check_draft(argparse.Namespace(**nothing | given | {"draft": "lookup"}))
    with pytest.raises(UsageError, match="is for drafts; add --draft lookup"):
        flags.check_draft(argparse.Namespace(**nothing | given))


def test_caches_shrink_as_they_are_told():
    parser = argparse.ArgumentParser()
    flags.add_cache(parser.add_argument_group())
    assert flags.given(parser.parse_args([]), flags.CACHE) == {}
    args = parser.parse_args(["--cache-budget", "64", "--cache-policy", "snapkv"])
    assert flags.given(args, flags.CACHE) == {"cache_budget": 64, "cache_policy": "snapkv"}


def test_what_was_not_given_is_left_to_the_preset():
    parser = argparse.ArgumentParser()
    flags.add_control(parser)
    args = parser.parse_args(["--control", "certified", "--tolerance", "0.2"])
    assert {name: given for name, given in flags.knobs(args).items() if given is not None} == {"tolerance": 0.2}
    preset(args.control, **flags.knobs(args))  # which takes them as they are
