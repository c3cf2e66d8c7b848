"""et_jax: a decoder that lets the entropy of the next token run the engine.

    model = et_jax.load()
    model.generate("It was", max_tokens=32)

The names below are the front door; each is imported when first used.
"""

import importlib
from typing import Any

_HOMES = {
    "load": "et_jax.serve.engine",
    "Model": "et_jax.serve.engine",
    "SamplingParams": "et_jax.serve.requests",
    "Completion": "et_jax.serve.completions",
    "GenerationRequest": "et_jax.serve.requests",
    "Controller": "et_jax.control.controller",
    "Signals": "et_jax.control.base",
    "ControlState": "et_jax.control.base",
    "Law": "et_jax.control.base",
    "chain": "et_jax.control.base",
    "preset": "et_jax.control.presets",
    "BlockView": "et_jax.control.view",
    "replace": "et_jax.types",
    "UsageError": "et_jax.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module et_jax has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
