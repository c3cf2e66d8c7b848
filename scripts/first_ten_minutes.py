"""Do what a person does in the first ten minutes, from the clone to a report, and time every step of it.

    python scripts/first_ten_minutes.py [--output RESULTS.json]

The repository that this script stands in is cloned, as it was last committed, into a temporary folder; what is done
there is what the README says, read out of it. Programs that were compiled on this machine before are not used; packages
that pip keeps in its cache are. A step that fails ends the script with its name and exit code 1.
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, table, write

PATIENCE = 600.0  # seconds that any one command may take
NOTEBOOK = "notebooks/quickstart.ipynb"
EXTRAS = "notebook,plot,report"
PROMPTS = ({"prompt": "It was"}, {"prompt": "The rain", "temperature": 0.7}, {"prompt": "She said", "max_tokens": 16})


class Broken(Exception):
    """A step did not come to what it should have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where the person works: the repository that is cloned, the clone, and the environment of every command."""

    repository: Path
    clone: Path
    environment: Mapping[str, str]

    def run(self, command: str, folder: Path | None = None) -> str:
        """Return what a command of the shell prints. Raises Broken where it fails or takes too long."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        where = {"cwd": folder or self.clone, "env": self.environment}
        with subprocess.Popen(["bash", "-c", command], **where, **streams) as process:
            try:
                out, said = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
                raise Broken(f"{command} took more than {PATIENCE:.0f} seconds") from error
        if process.returncode:
            raise Broken(f"{command} ended with code {process.returncode}: {(said or out).strip()[-500:]}")
        return out

    def blocks(self, heading: str, language: str) -> list[str]:
        """Return the blocks of a language under a heading of the README. Raises Broken where there are none."""
        readme = (self.clone / "README.md").read_text(encoding="utf-8")
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", readme, re.DOTALL | re.MULTILINE)
        found = re.findall(rf"```{language}\n(.*?)```", section[1] if section else "", re.DOTALL)
        if not found:
            raise Broken(f"the README has no {language} under the heading {heading!r}")
        return found


def clone(place: Place) -> str:
    """Clone the repository."""
    place.run(f"git clone --quiet {shlex.quote(str(place.repository))} {shlex.quote(str(place.clone))}", Path.cwd())
    return f"commit {place.run('git rev-parse --short HEAD').strip()}"


def installation(place: Place) -> tuple[str, str]:
    """Return the commands of the README that set up, and the one behind them that generates the first text."""
    commands, _, first = place.blocks("Install", "bash")[0].strip().rpartition(" && ")
    return commands, first


def set_up(place: Place) -> str:
    """Make the environment and install the package."""
    place.run(installation(place)[0])
    return f"{len(place.run('.venv/bin/python -m pip list --format freeze').splitlines())} packages"


def first_run(place: Place) -> str:
    """Generate a first text."""
    return line(place.run(installation(place)[1]))


def extras(place: Place) -> str:
    """Install what reports and notebooks need, and Jupyter."""
    place.run(f".venv/bin/pip install notebook '.[{EXTRAS}]'")
    return f"notebook {EXTRAS}"


def report(place: Place) -> str:
    """Generate it once more, with a report."""
    place.run(f"{installation(place)[1]} --report report.html")
    return page(place.clone / "report.html")


def notebook(place: Place) -> str:
    """Run the first notebook."""
    place.run(f".venv/bin/jupyter nbconvert --to notebook --execute {NOTEBOOK} --output-dir ran")
    ran = json.loads((place.clone / "ran" / Path(NOTEBOOK).name).read_text(encoding="utf-8"))
    cells = [cell for cell in ran["cells"] if cell["cell_type"] == "code"]
    return f"{len(cells)} cells, {sum(bool(cell['outputs']) for cell in cells)} with output"


def law(place: Place) -> str:
    """Write a law of one's own into a file, and run it."""
    (place.clone / "law.py").write_text(
        place.blocks("In Python", "python")[0] + place.blocks("Laws", "python")[0], encoding="utf-8"
    )
    return line(place.run(".venv/bin/python law.py").splitlines()[-1])


def batch(place: Place) -> str:
    """Answer the lines of a small file."""
    (place.clone / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PROMPTS), encoding="utf-8")
    place.run(place.blocks("Batch files", "bash")[0].strip())
    return answered(place.clone / "out.jsonl")


def batch_report(place: Place) -> str:
    """Answer them once more, with a report."""
    command = place.blocks("Batch files", "bash")[0].strip().replace("out.jsonl", "again.jsonl")
    place.run(f"{command} --report batch.html")
    return f"{answered(place.clone / 'again.jsonl')}; {page(place.clone / 'batch.html')}"


def line(text: str) -> str:
    """Return the beginning of a text on one line. Raises Broken where there is none."""
    if not text.strip():
        raise Broken("no text came out")
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."


def page(path: Path) -> str:
    """Return what a report is. Raises Broken for one that is no page, or that loads anything from a network."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if "<html" not in text:
        raise Broken(f"{path.name} is no page")
    if loaded := re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?https?:[^\"'>]*", text):
        raise Broken(f"{path.name} loads from a network: {loaded[0]}")
    return f"a page of {len(text.encode()) / 1000:.0f} kB"


def answered(path: Path) -> str:
    """Return how many rows there are. Raises Broken unless every line has an answer."""
    rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
    if len(rows) != len(PROMPTS) or any(row["error"] for row in rows):
        raise Broken(
            f"{path.name} has {len(rows)} rows for {len(PROMPTS)} lines, errors {[row['error'] for row in rows]}"
        )
    return f"{len(rows)} answers"


Step = Callable[[Place], str]
STEPS: dict[str, Step] = {
    "clone": clone,
    "set up": set_up,
    "first run": first_run,
    "extras": extras,
    "report": report,
    "notebook": notebook,
    "a law of one's own": law,
    "batch": batch,
    "report of a batch": batch_report,
}


def walked(steps: Mapping[str, Step], place: Place) -> list[dict[str, str | float]]:
    """Return the seconds of every step and what came out of it. Raises Broken with the name of one that fails."""
    rows = []
    for name, step in steps.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            came = step(place)
        except (Broken, OSError, ValueError) as error:
            raise Broken(f"The step {name!r} failed: {error}") from error
        rows.append({"step": name, "seconds": round(time.monotonic() - began, 1), "came_out": came})
    return rows


def main() -> None:
    args = arguments.parser(__doc__, results="first_ten_minutes.json").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        place = Place(repository=REPOSITORY, clone=Path(folder) / "et_jax", environment=kept | own)
        try:
            rows = walked(STEPS, place)
        except Broken as error:
            sys.exit(f"{error}.")
    total = round(sum(float(row["seconds"]) for row in rows), 1)
    write(args.output, "scripts/first_ten_minutes.py", {"prompts": len(PROMPTS)}, total_seconds=total, steps=rows)
    print(table(["step", "seconds", "what came out"], [list(row.values()) for row in rows]))
    print(f"\n{total:.0f} seconds in all.")


if __name__ == "__main__":
    main()
