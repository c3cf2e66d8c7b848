"""What builds the documentation, each file of it as a module."""

import functools
import importlib.util
from types import ModuleType

import pytest
from places import ROOT


@functools.cache
def builder(name: str) -> ModuleType:
    """Return the file docs/NAME.py; the test is skipped where the extra `docs` is not installed."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
