"""The documents name what there is: the front door, modules and knobs of control, and the families of models."""

import re

import pytest
from places import ROOT
from scripts_here import module_of

import et_jax
from et_jax.cli import flags
from et_jax.control.presets import KNOBS, PRESETS
from et_jax.models.families.registry import FAMILIES


def test_the_front_door_is_documented_whole():
    documented = re.findall(r"^::: et_jax\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(et_jax.__all__)


def test_every_module_of_control_has_its_page():
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    named = {path.stem for path in (ROOT / "et_jax/control").glob("*.py")} - {"__init__"}
    pages = set(module_of(ROOT / "docs/hooks.py").modules().values())
    assert {f"reference/control.{name}.md" for name in named} <= pages


CONTROL = (ROOT / "docs" / "control.md").read_text(encoding="utf-8")


def test_every_knob_stands_in_the_table_with_its_defaults():
    heading = "| knob | meaning, and the default under each preset that has it |\n| --- | --- |\n"
    rows = [f"| `--{name.replace('_', '-')}` | {flags.knob_help(name, PRESETS)} |\n" for name in KNOBS]
    assert f"\n{heading}{''.join(rows)}\n" in CONTROL


MODELS = (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_every_family_is_listed():
    listed = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", MODELS)
    assert sorted(listed) == sorted(family.class_name for family in FAMILIES.values())


def test_the_family_that_is_shown_is_its_file():
    [shown] = re.findall(r"```py\n(.*?)```", MODELS, re.DOTALL)
    file = (ROOT / "et_jax/models/families/granite.py").read_text(encoding="utf-8")
    assert file.endswith("\n\n\n" + shown)
    assert len(file.splitlines()) < 50
