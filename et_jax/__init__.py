"""et_jax: a decoder that lets the entropy of the next token run the engine.

    model = et_jax.load()
    model.generate("It was", max_tokens=32)

The names below are the front door; each is imported when first used, so that `import et_jax` alone loads no JAX.
Editors and type checkers read the imports above the table.
"""

import importlib
from typing import TYPE_CHECKING, Any

from et_jax.io import own_sources as own_sources  # first, for it notes when the import began

if TYPE_CHECKING:
    from et_jax.control.base import ControlState as ControlState
    from et_jax.control.base import Law as Law
    from et_jax.control.base import Signals as Signals
    from et_jax.control.base import chain as chain
    from et_jax.control.controller import Controller as Controller
    from et_jax.control.presets import preset as preset
    from et_jax.control.selector import Selector as Selector
    from et_jax.control.view import BlockView as BlockView
    from et_jax.control.view import needing as needing
    from et_jax.errors import UsageError as UsageError
    from et_jax.models.module import ModuleConfig as ModuleConfig
    from et_jax.report.notebook import show as show
    from et_jax.report.page import write_report as write_report
    from et_jax.serve.completions import Completion as Completion
    from et_jax.serve.engine import load as load
    from et_jax.serve.model import Model as Model
    from et_jax.serve.requests import GenerationRequest as GenerationRequest
    from et_jax.serve.requests import SamplingParams as SamplingParams
    from et_jax.types import Count as Count
    from et_jax.types import Number as Number
    from et_jax.types import replace as replace
    from et_jax.types import static as static
    from et_jax.types import value as value

_HOMES = {
    "load": "et_jax.serve.engine",
    "Model": "et_jax.serve.model",
    "SamplingParams": "et_jax.serve.requests",
    "GenerationRequest": "et_jax.serve.requests",
    "ModuleConfig": "et_jax.models.module",
    "Completion": "et_jax.serve.completions",
    "UsageError": "et_jax.errors",
    "write_report": "et_jax.report.page",
    "show": "et_jax.report.notebook",
    # what a writer of laws needs
    "Controller": "et_jax.control.controller",
    "preset": "et_jax.control.presets",
    "Law": "et_jax.control.base",
    "chain": "et_jax.control.base",
    "Signals": "et_jax.control.base",
    "ControlState": "et_jax.control.base",
    "Selector": "et_jax.control.selector",
    "BlockView": "et_jax.control.view",
    "needing": "et_jax.control.view",
    "value": "et_jax.types",
    "static": "et_jax.types",
    "Number": "et_jax.types",
    "Count": "et_jax.types",
    "replace": "et_jax.types",
}
__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a checker that saw this would take any name for one

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module et_jax has no attribute {name}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
