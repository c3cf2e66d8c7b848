"""Settings measured on a device, which take precedence over a kernel's heuristic.

`tuned/<device kind>.json` maps a kernel and the facts that its best settings depend on to those settings:

    {"paged_attention/xla page_size=16 head_dim=64 queries=4 dtype=float32": {"group": 32, "joint": false, "pieces": 4}}

`scripts/tune_kernels.py` measures and writes it. Without a file for the device, or for other keys, the rule applies.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from et_jax.errors import UsageError
from et_jax.pallas.backend import device_kind

C = TypeVar("C")
FOLDER = Path(__file__).parent / "tuned"


def path(kind: str) -> Path:
    """Return the path of the table for a kind of device, as JAX names it ("NVIDIA H200")."""
    return FOLDER / f"{kind.lower().replace(' ', '-')}.json"


def key(kernel: str, **facts: object) -> str:
    """Return the table's key for a kernel "op/backend" and the facts that its best settings depend on."""
    return " ".join([kernel, *(f"{name}={fact}" for name, fact in facts.items())])


def settings(by_rule: C, kernel: str, **facts: object) -> C:
    """Return the settings recorded for the traced device under this key, or else those of the rule."""
    table = path(device_kind())
    recorded = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    name = key(kernel, **facts)
    if name not in recorded:
        return by_rule
    try:
        return _built(type(by_rule), recorded[name])
    except (TypeError, ValueError) as reason:
        raise UsageError(
            f'{table}: "{name}" has settings that the kernel refuses ({reason}): delete the entry, or record it again '
            f"with scripts/tune_kernels.py"
        ) from reason


def _built(config: type[C], values: Mapping[str, Any]) -> C:
    """Return a configuration, with its nested ones, from their fields."""
    fields = {field.name: field.type for field in dataclasses.fields(config)}
    inner = {
        name: _built(fields[name], value)
        for name, value in values.items()
        if dataclasses.is_dataclass(fields.get(name))
    }
    return config(**{**values, **inner})
