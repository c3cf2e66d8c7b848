"""The reference documents every name of `import et_jax`, and every module of control has a page."""

import re

from site_here import ROOT, builder

import et_jax


def test_the_front_door_is_documented_whole():
    documented = re.findall(r"^::: et_jax\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(et_jax.__all__)


def test_every_module_of_control_has_its_page():
    named = {path.stem for path in (ROOT / "et_jax/control").glob("*.py")} - {"__init__"}
    pages = set(builder("hooks").modules().values())
    assert {f"reference/control.{name}.md" for name in named} <= pages
