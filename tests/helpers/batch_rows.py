"""Rows of a batch's output, and outputs that a job began."""

import json
from pathlib import Path
from typing import Any

from et_jax.batch.journal import open_journal

SETTINGS: dict[str, Any] = {"model_files": "abc", "params": {"temperature": 1.0, "stop": ["x"], "top_k": 0}}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{name}", "custom_id": name, "response": {}, "error": None} | more


def data(*names: str) -> bytes:
    """The rows of these names as an output contains them."""
    return b"".join(json.dumps(row(name)).encode() + b"\n" for name in names)


def begin(path: Path, *names: str, settings: dict[str, Any] = SETTINGS) -> bytes:
    """Have a job write rows; return the content of its output."""
    with open_journal(path, settings) as journal:
        for name in names:
            journal.append(row(name))
    return path.read_bytes()


def recorded(path: Path) -> list[str | int]:
    """The rows that a job finds which goes on."""
    with open_journal(path, SETTINGS) as journal:
        return list(journal.recorded)
