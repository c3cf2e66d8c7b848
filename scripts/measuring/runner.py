"""Runs an experiment: measures each arm that its file does not have yet, and replaces the file after each.

A file of results holds runs. A run has its provenance (commit, settings, fingerprints of weights and texts, machine)
and the groups of arms. Of one experiment there is one run for each set of settings: an arm that is there with the same
provenance is not measured again, a run of another provenance is replaced.
"""

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_file
from et_jax.models.fingerprint import fingerprint
from et_jax.models.hub import resolve
from scripts.measuring.experiment import Base, Experiment, Missed
from scripts.measuring.results import REPOSITORY, machine
from scripts.measuring.tables import summary
from scripts.measuring.timing import in_turns

MEASURED_BY = ("et_jax", "scripts/measuring", "scripts/experiments", "scripts/chip")  # what figures depend on


def commit(checkout: Path = REPOSITORY) -> str:
    """Return the commit of a checkout, with a digest of what was changed since in the code that measures."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD").strip() or "unknown"
    changes = git("diff", "HEAD", "--", *MEASURED_BY)
    if not changes:
        return head
    return f"{head} with changes {hashlib.blake2b(changes.encode(), digest_size=6).hexdigest()}"


def provenance(settings: Base) -> dict[str, Any]:
    """Return what figures come from: texts by name and digest, models by name and fingerprint, checkouts by commit.

    Raises UsageError for a model that there is not.
    """
    texts, models = settings.named("text"), settings.named("model")
    digests = {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in texts.items()}
    weights = {name: fingerprint(resolve(one)) for name, one in models.items() if one}
    folders = {name: Path(one).name for name, one in models.items() if one and Path(one).is_dir()}
    checkouts = {name: commit(Path(one)) for name, one in settings.named("checkout").items() if one}
    return {
        "commit": commit(),
        "settings": {name: _plain(one) for name, one in vars(settings).items()} | folders | checkouts,
        "weights": weights,
        "texts": digests,
        "machine": machine(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def _origin(run: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of the same code, settings, weights, texts and kind of machine have in common."""
    place = {name: value for name, value in run["machine"].items() if name != "load_average"}
    return {name: run[name] for name in ("commit", "settings", "weights", "texts")} | {"machine": place}


class Record:
    """A file of results, and the run in it that is being measured. Raises UsageError where it cannot be written."""

    def __init__(self, path: Path | None, name: str, experiment: Experiment, known: dict[str, Any]) -> None:
        self.path, self.others, self.run = path, [], known | {"groups": []}
        self.head = {"experiment": name, "question": experiment.question}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        for run in runs_of(path):
            if run["settings"] != known["settings"]:
                self.others.append(run)
            elif _origin(run) == _origin(known):
                self.run = run

    def group(self, labels: Mapping[str, Any], baseline: str | None) -> dict[str, Any]:
        """Return what the run has of a group."""
        own = {name: _plain(one) for name, one in labels.items()}
        for found in self.run["groups"]:
            if found["labels"] == own:
                return found
        self.run["groups"].append({"labels": own, "baseline": baseline, "arms": {}})
        return self.run["groups"][-1]

    def write(self) -> None:
        """Replace the file."""
        if self.path is not None:
            content = self.head | {"runs": [*self.others, self.run]}
            replace_file(self.path, json.dumps(content, indent=1) + "\n")


def runs_of(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of results, none where there is no file. Raises UsageError for another file."""
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no runs of an experiment; choose another file.") from error


def run(
    name: str, experiment: Experiment, settings: Base, path: Path | None, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure what the file lacks, and return the run."""
    record = Record(path, name, experiment, provenance(settings))
    for group in experiment.groups(settings):
        kept = record.group(group.labels, group.baseline)
        done = {arm for arm, found in kept["arms"].items() if not (group.timed and "missed" in found)}
        missing = {arm: given for arm, given in group.arms.items() if arm not in done}
        if not missing:
            continue
        # ratios are taken round by round, so arms that are timed are timed together
        measured = _one_by_one(missing) if group.rounds is None else _timed(group.arms, group.rounds)
        for arm, found in measured:
            kept["arms"][arm] = found
            summarise(experiment, kept, timed=group.timed or group.rounds is not None)
            record.write()
            said = [f"{one} {value['value']:.4g}" for one, value in found.get("figures", {}).items()]
            report(" ".join([*map(str, group.labels.values()), arm, found.get("missed", ""), *said]))
    record.write()
    return record.run


def _one_by_one(arms: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, measure in arms.items():
        began = time.perf_counter()
        try:
            found: dict[str, Any] = {"rows": rows_of(measure())}
        except Missed as error:
            found = {"missed": str(error)}
        yield name, found | {"seconds": round(time.perf_counter() - began, 2)}


def _timed(arms: Mapping[str, Callable[[], Any]], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    ready, began = {}, time.perf_counter()
    for name, set_up in arms.items():
        try:
            ready[name] = set_up()
        except Missed as error:
            yield name, {"missed": str(error), "seconds": 0.0}
    for name, found in in_turns(ready, rounds).items():
        yield name, {"rows": rows_of(found), "seconds": round(time.perf_counter() - began, 2)}


def rows_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as JSON has them. Raises ValueError where two figures have different numbers of rows."""
    made = {name: np.asarray(one, np.float64) for name, one in found.items()}
    counts = {len(one) for one in made.values() if one.ndim}
    if len(counts) > 1 or any(one.ndim > 1 for one in made.values()):
        shapes = {name: one.shape for name, one in made.items()}
        raise ValueError(f"An arm returned figures of shapes {shapes}; each has one value a row, of the same rows.")
    return {name: one.tolist() for name, one in made.items()}


def summarise(experiment: Experiment, group: dict[str, Any], timed: bool) -> None:
    """Put beside the rows of each arm of a group what they amount to, and what they are against the baseline."""
    baseline = group["arms"].get(group["baseline"], {}).get("rows")
    for name, arm in group["arms"].items():
        if "rows" in arm:
            against = None if name == group["baseline"] else baseline
            arm["figures"] = summary(experiment, arm["rows"], against, timed)
