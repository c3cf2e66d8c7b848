"""What builds the documentation, each file of it as a module."""

from types import ModuleType

import pytest
from places import ROOT
from scripts_here import module_of


def builder(name: str) -> ModuleType:
    """Return the file docs/NAME.py; the test is skipped where the extra `docs` is not installed."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    return module_of(ROOT / "docs" / f"{name}.py")
