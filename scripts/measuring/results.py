"""The machine that figures come from, and Markdown tables."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

REPOSITORY = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the load, JAX's device and JAX's version."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; floats are shown to three significant digits, None as a dash."""
    lines = [header, ["---"] * len(header), *[[cell(value) for value in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
    """Return one cell of a table as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", r"\|")
