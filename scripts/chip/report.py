"""The table of measured steps that docs/evidence.md shows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.chip.cases import Case, size
from scripts.chip.modelled import BYTES_A_SECOND, SECONDS_A_LAUNCH, modelled
from scripts.chip.record import read
from scripts.measuring import tables
from scripts.measuring.results import RESULTS, table

PATH = RESULTS / "chip.json"
DOCUMENT, PART = tables.DOCS / "evidence.md", "bench_chip"
BY = {"decode": "`decode`", "generate": "`Model.generate`", "torch": "torch, one CUDA graph"}
HEADER = ["shape", "sequences x tokens", "by", "control", "ms a step", "times off's", "ms, modelled", "blocks read"]


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: a line for each case, with the least and the greatest round, or the reason where it failed."""
    drafted, counted = (any(row.get(name) is not None for row in rows) for name in ("tokens_per_step", "kernels"))
    header = HEADER + ["tokens a step"] * drafted + ["kernels a step"] * counted
    off = {_place(row): row["milliseconds"] for row in rows if row["control"] == "off" and "milliseconds" in row}
    lines = []
    for row in rows:
        place = [row["shape"], f"{row['rows']} x {size(row['tokens'])}", BY[row["engine"]], row["control"]]
        if "error" in row:
            lines.append([*place, row["error"], *[None] * (len(header) - len(place) - 1)])
            continue
        case = Case(**{name: row[name] for name in ("engine", "shape", "rows", "tokens", "control")})
        model = modelled(case, row.get("share_read"))
        base = off.get(_place(row)) if row["control"] != "off" else None
        figures = [
            f"{row['milliseconds']:.4g} ({min(row['rounds']):.4g} to {max(row['rounds']):.4g})",
            base and row["milliseconds"] / base,
            model and model["milliseconds"],
            row.get("share_read"),
        ]
        figures += [row.get("tokens_per_step")] * drafted + [row.get("kernels")] * counted
        lines.append([*place, *figures])
    return table(header, lines)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("engine", "shape", "rows", "tokens"))


def part(provenance: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the document shows of a run."""
    place, settings = provenance["machine"], provenance["settings"]
    calls = f"medians of {settings['rounds']} calls of {settings['steps']} steps, with the least and the greatest"
    model = f"{BYTES_A_SECOND / 1e12:g} TB/s and {1e6 * SECONDS_A_LAUNCH:g} us a launch (`scripts/chip/modelled.py`)"
    origin = (
        f"`python -m scripts.bench_chip` on {place['device']}, jax {place['jax']}: {calls}. Modelled is by bytes over "
        f"{model}, and not measured."
    )
    return f"{origin}\n\n{shown(rows)}"


def write(path: Path = PATH, document: Path = DOCUMENT) -> bool:
    """Write the table into the document, and return whether there is a run to show."""
    if not path.exists():
        return False
    tables.insert(document, PART, part(*read(path)))
    return True
