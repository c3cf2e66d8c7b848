"""Scripts as modules, each loaded from its own file."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

from places import SCRIPTS


@functools.cache
def module_of(path: Path) -> ModuleType:
    """Return a file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> ModuleType:
    """Return the script of this name."""
    return module_of(SCRIPTS / f"{name}.py")
