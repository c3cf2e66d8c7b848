"""Scripts as modules, found as they find each other."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module
