"""The Python of the README and of the guides runs as it stands, one block after another."""

import re

import pytest
from places import ROOT

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def blocks(document: str) -> list[str]:
    """Return the Python blocks of a document, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def run(document: str) -> None:
    """Run every block, each with the names of those before it."""
    names: dict[str, object] = {}
    for block in blocks(document):
        exec(compile(block, document, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/long_context.md", "docs/models.md", "docs/serving.md"])
def test_the_examples_run(document: str) -> None:
    assert blocks(document)
    run(document)


def test_the_examples_of_laws_run() -> None:
    assert len(blocks("docs/control.md")) >= 4
    run("docs/control.md")


def test_the_commands_are_those_that_every_change_must_pass() -> None:
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert commands[1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
