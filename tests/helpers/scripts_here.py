"""Scripts as modules, each loaded from its own file."""

import functools
import importlib.util
from types import ModuleType

from places import SCRIPTS


@functools.cache
def script(name: str) -> ModuleType:
    """Return the script of this name."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
