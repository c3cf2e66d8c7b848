"""What the site shows beside docs/: one source for each page, and links that lead to the pages of their files."""

import re
from types import SimpleNamespace

import pytest
from site_here import ROOT, builder

import et_jax


def shown(page: str, markdown: str) -> str:
    return builder("hooks").on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)


@pytest.mark.parametrize(
    ("page", "written", "expected"),
    [
        ("index.md", "[laws](docs/control.md#laws-are-values)", "[laws](control.md#laws-are-values)"),
        ("models/bundled_small.md", "[card](../bundled/README.md)", "[card](bundled.md)"),
        ("control.md", "[away](https://example.org/docs/control.md)", "[away](https://example.org/docs/control.md)"),
        ("control.md", "[clock](../et_jax/control/clock.py)", "[clock](reference/control.clock.md)"),
        ("control.md", "`et_jax/control/clock.py`", "[`et_jax/control/clock.py`](reference/control.clock.md)"),
        ("index.md", "[the script](scripts/fuzz.py)", "the script"),
        ("index.md", "print(law.laws[1], f[0](x))", "print(law.laws[1], f[0](x))"),
    ],
)
def test_a_link_leads_to_the_page_of_its_file(page, written, expected):
    assert shown(page, written) == expected


def test_the_front_door_is_documented_whole():
    documented = re.findall(r"^::: et_jax\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(et_jax.__all__)


def test_every_module_of_control_has_its_page():
    named = {path.stem for path in (ROOT / "et_jax/control").glob("*.py")} - {"__init__"}
    pages = set(builder("hooks").modules().values())
    assert {f"reference/control.{name}.md" for name in named} <= pages
