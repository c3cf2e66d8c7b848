"""A value of every class of the laws that holds a number, found by looking."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np

import et_jax.control
from et_jax.control import (
    clock,
    draft,
    draft_speed,
    guards,
    priority,
    select,
    smoothing,
    temperature,
    temperature_rules,
    tolerance,
)
from et_jax.control.base import as_value, chain
from et_jax.control.compression import Compression
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.selector import MaskSelector
from et_jax.types import Number

WARM = temperature.Thermostat(2.0)
EXAMPLES = [
    Compression(budget=64),
    as_value(len),
    clock.Beside(clock.FallClock(), "other"),
    chain(WARM, smoothing.EmaEntropy(), tolerance.EntropyTolerance()),
    guards.Clipped(WARM, "tolerance", 0.0, 1.0),
    guards.Floored(tolerance.EntropyTolerance(), 0.1),
    guards.NeverAboveStart(WARM, "temperature"),
    guards.RateLimited(tolerance.EntropyTolerance(), "tolerance", 0.1),
    guards.Saturation(WARM, "temperature", 0.1, 2.0),
    guards.Stability(WARM, 0.05),
    priority.Aged(priority.FCFS(), 1.0, 0.1),
    select.Guarded(select.Dense()),
    select.PerHead(select.Certified(select.coded_bounds), AttentionEntropy()),
    MaskSelector(len),
    select.Quest(3),
    temperature_rules.CoolOnly(temperature_rules.Newton(2.0)),
    tolerance.Shuffled(np.ones((2, 3))),
    draft_speed.RooflineLength(
        times=draft.StepTimes(plain=1.0, plain_cached=0.1, drafted=0.5, drafted_cached=0.1, row=0.1, row_cached=0.0)
    ),
]
"""Values of the classes that cannot be made of one number each."""


def values() -> Iterator[Any]:
    """Yield a value of every dataclass of the laws that holds a number."""
    examples = {type(one): one for one in EXAMPLES}
    for module in pkgutil.iter_modules(et_jax.control.__path__):
        loaded = importlib.import_module(f"et_jax.control.{module.name}")
        for _, kind in inspect.getmembers(loaded, dataclasses.is_dataclass):
            if not isinstance(kind, type) or kind.__module__ != loaded.__name__ or not hasattr(kind, "__post_init__"):
                continue
            asked = [f for f in dataclasses.fields(kind) if f.init and f.default is f.default_factory]
            others = [f.name for f in asked if f.type not in (float, Number)]
            assert kind in examples or not others, f"add a {kind.__name__} to EXAMPLES, for its {others}"
            yield examples.pop(kind, None) or kind(**{f.name: 0.5 for f in asked})
    assert not examples
