"""The README's Python runs as it stands, one block after another."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 4
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 4
