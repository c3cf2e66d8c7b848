"""The page on models: it names every family, and shows one as it is."""

import re

from places import ROOT

from et_jax.models.families.registry import FAMILIES

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_every_family_is_listed():
    listed = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGE)
    assert sorted(listed) == sorted(family.class_name for family in FAMILIES.values())


def test_the_family_that_is_shown_is_its_file():
    [shown] = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    file = (ROOT / "et_jax/models/families/granite.py").read_text(encoding="utf-8")
    assert file.endswith("\n\n\n" + shown)
    assert len(file.splitlines()) < 50
