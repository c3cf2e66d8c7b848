"""The file of a run: its provenance, and a row for every case, written anew after each."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_file
from scripts.chip.cases import Case

COMPARED = ("device", "jax")  # of the machine: what a run that is resumed must share


class Record:
    """Rows by the names of cases, kept in a file where there is one. Raises UsageError where it cannot be written.

    With `resume` the rows that the file has stay, but for those of cases that failed; without, it is begun anew.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path, self.rows = path, {}
        self.provenance: dict[str, Any] | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        if resume and path.exists():
            self.provenance, rows = read(path)
            self.rows = {row["case"]: row for row in rows}

    def lacks(self, case: Case) -> bool:
        """Return whether there are no figures of a case."""
        return "error" in self.rows.get(case.name, {"error": "not measured"})

    def begin(self, provenance: dict[str, Any]) -> None:
        """Take down where rows come from. Raises UsageError where those that are there come from elsewhere."""
        if self.provenance is not None and any("error" not in row for row in self.rows.values()):
            for name, (old, new) in differences(self.provenance, provenance).items():
                raise UsageError(f"{self.path} has figures of {name} {old}, not {new}; leave out --resume.")
        self.provenance = provenance

    def add(self, case: Case, found: Mapping[str, Any]) -> None:
        """Add what was found of a case, and replace the file."""
        self.rows[case.name] = {"case": case.name, **dataclasses.asdict(case), **found}
        if self.path is not None:
            content = {"script": "scripts/bench_chip.py", **(self.provenance or {}), "rows": list(self.rows.values())}
            replace_file(self.path, json.dumps(content, indent=1) + "\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what two provenances do not share of what figures depend on: both values, by name."""
    pairs = {"commit": (old["commit"], new["commit"])}
    pairs |= {name: (old["machine"][name], new["machine"][name]) for name in COMPARED}
    for name in ("steps", "quick"):
        pairs[name] = old["settings"][name], new["settings"][name]
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the provenance and the rows of a file. Raises UsageError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = ("commit", "settings", "weights", "texts", "machine")
        return {name: content[name] for name in names}, content["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no run of bench_chip; choose another file.") from error


def line(name: str, found: Mapping[str, Any]) -> str:
    """Return what is printed of a case."""
    if "error" in found:
        return f"{name}: FAILED {found['error']}"
    said = [f"{found['milliseconds']:.3f} ms a step"]
    said += [f"{found['share_read']:.3f} of the blocks read"] if "share_read" in found else []
    said += [f"{found['tokens_per_step']:.2f} tokens a step"] if "tokens_per_step" in found else []
    said += [f"{found['kernels']:.0f} kernels a step"] if found.get("kernels") is not None else []
    return f"{name}: {', '.join(said)}"
