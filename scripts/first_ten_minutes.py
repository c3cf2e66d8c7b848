"""Run what the README says from the clone to a report, as in a person's first ten minutes, and time every step.

    python scripts/first_ten_minutes.py [--output RESULTS.json]

The repository of this script is cloned, as it was last committed, into a temporary folder, and the commands are read
out of its README. Programs that were compiled on this machine before are not used; packages that pip keeps in its cache
are. A step that fails ends the script with its name and exit code 1.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, table, write

PATIENCE = 600.0  # seconds of a command
NOTEBOOK = "quickstart.ipynb"
PROMPTS = ({"prompt": "It was"}, {"prompt": "The rain", "temperature": 0.7}, {"prompt": "She said", "max_tokens": 16})


class Broken(Exception):
    """A step failed."""


def blocks(clone: Path, heading: str, language: str) -> list[str]:
    """Return the blocks of a language under a heading of the README. Raises Broken where there are none."""
    readme = (clone / "README.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", readme, re.DOTALL | re.MULTILINE)
    found = re.findall(rf"```{language}\n(.*?)```", section[1] if section else "", re.DOTALL)
    if not found:
        raise Broken(f"the README has no {language} under the heading {heading!r}")
    return [block.strip() for block in found]


def steps(clone: Path, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield a name and a command of the shell for every step; the README is read once it is cloned."""
    yield "clone", f"git clone --quiet '{repository}' ."
    install, _, first = blocks(clone, "Install", "bash")[0].rpartition(" && ")
    batch = blocks(clone, "Batch files", "bash")[0]
    (clone / "law.py").write_text(
        "\n".join([blocks(clone, "In Python", "python")[0], blocks(clone, "Laws", "python")[0]])
    )
    (clone / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    yield "set up", install
    yield "first run", first
    yield "extras", ".venv/bin/pip install notebook '.[notebook,plot,report]'"
    yield "report", f"{first} --report report.html"
    yield "notebook", f".venv/bin/jupyter nbconvert --to notebook --execute notebooks/{NOTEBOOK} --output-dir ran"
    yield "a law of one's own", ".venv/bin/python law.py"
    yield "batch", batch
    yield "report of a batch", batch.replace("out.jsonl", "again.jsonl") + " --report batch.html"


def run(command: str, clone: Path, environment: dict[str, str]) -> str:
    """Return what a command prints. Raises Broken where it fails or takes too long."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", "-c", command], cwd=clone, env=environment, **how) as process:
        try:
            out, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            raise Broken(f"{command} took more than {PATIENCE:.0f} seconds") from error
    if process.returncode:
        raise Broken(f"{command} ended with code {process.returncode}: {(said or out).strip()[-500:]}")
    return out


def outcome(name: str, out: str, clone: Path) -> str:
    """Return in a few words what a step gave. Raises Broken where it is not what the README promises."""
    match name:
        case "first run" | "a law of one's own":
            if not out.strip():
                raise Broken("no text came out")
            return " ".join(out.split())[-60:]
        case "notebook":
            cells = json.loads((clone / "ran" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
            return f"{sum(bool(cell.get('outputs')) for cell in cells)} cells with output"
        case "report":
            return page(clone / "report.html")
        case "batch":
            return answered(clone / "out.jsonl")
        case "report of a batch":
            return f"{answered(clone / 'again.jsonl')}; {page(clone / 'batch.html')}"
    return ""


def page(path: Path) -> str:
    """Return the size of a report. Raises Broken for one that is no page, or that loads anything from a network."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if "<html" not in text:
        raise Broken(f"{path.name} is no page")
    if loaded := re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?https?:[^\"'>]*", text):
        raise Broken(f"{path.name} loads from a network: {loaded[0]}")
    return f"a page of {len(text.encode()) / 1000:.0f} kB"


def answered(path: Path) -> str:
    """Return how many answers there are. Raises Broken unless every line has one."""
    errors = [json.loads(row)["error"] for row in path.read_text(encoding="utf-8").splitlines()]
    if len(errors) != len(PROMPTS) or any(errors):
        raise Broken(f"{path.name} has {len(errors)} rows for {len(PROMPTS)} lines, errors {errors}")
    return f"{len(errors)} answers"


def walk(clone: Path, repository: Path, environment: dict[str, str]) -> list[dict[str, str | float]]:
    """Return the seconds and the outcome of every step. Raises Broken with the name of one that fails."""
    rows, name = [], "clone"
    try:
        for name, command in steps(clone, repository):
            print(f"{name} ...", file=sys.stderr, flush=True)
            began = time.monotonic()
            came = outcome(name, run(command, clone, environment), clone)
            rows.append({"step": name, "seconds": round(time.monotonic() - began, 1), "came_out": came})
    except (Broken, OSError, ValueError) as error:
        raise Broken(f"The step {name!r} failed: {error}") from error
    return rows


def main() -> None:
    args = arguments.parser(__doc__, results="first_ten_minutes.json").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "et_jax"
        clone.mkdir()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
        try:
            rows = walk(clone, REPOSITORY, environment)
        except Broken as error:
            sys.exit(f"{error}.")
    total = round(sum(float(row["seconds"]) for row in rows), 1)
    write(args.output, "scripts/first_ten_minutes.py", {"prompts": len(PROMPTS)}, total_seconds=total, steps=rows)
    print(table(["step", "seconds", "what came out"], [list(row.values()) for row in rows]))
    print(f"\n{total:.0f} seconds in all.")


if __name__ == "__main__":
    main()
