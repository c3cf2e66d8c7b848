"""Workers, one after the other: what each says of its cases, until the time is up."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.chip.cases import Case, Settings, processes
from scripts.chip.record import Record, line
from scripts.chip.worker import spoken
from scripts.measuring.results import REPOSITORY

Said = Iterator[dict[str, Any]]


class OutOfTime(Exception):
    """Raised where a worker was ended because the time was up."""


def worker(settings: Settings, cases: Sequence[Case], until: float) -> Said:
    """Start a worker and yield what it says, then {"code": its exit code}.

    Ends it, and raises OutOfTime, at `until`, by `time.monotonic`.
    """
    command = [sys.executable, "-m", "scripts.chip.worker", spoken(settings, list(cases))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        ended: list[bool] = []
        timer = threading.Timer(max(0.0, until - time.monotonic()), lambda: (ended.append(True), process.kill()))
        timer.start()
        try:
            assert process.stdout is not None
            for said in process.stdout:
                if said.endswith("\n"):  # what is cut off is the last word of a process that was ended
                    yield json.loads(said)
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
    if ended:
        raise OutOfTime
    yield {"code": process.returncode}


def run(
    settings: Settings,
    cases: Sequence[Case],
    record: Record,
    seconds: float,
    report: Callable[[str], None],
    start: Callable[[Settings, Sequence[Case], float], Said] = worker,
) -> list[Case]:
    """Measure the cases that the record lacks, each in a worker of its size, and return those for which time ran out.

    A worker ends after a case that failed; the cases after it get another one.
    """
    until = time.monotonic() + seconds
    missing = [case for case in cases if record.lacks(case)]
    left = list(missing)
    for group in processes(missing):
        waiting = list(group)
        while waiting:
            if time.monotonic() >= until:
                return left
            failed = False
            try:
                for said in start(settings, list(waiting), until):
                    if "provenance" in said:
                        record.begin(said["provenance"])
                    elif "found" in said:
                        failed = "error" in said["found"]
                        _add(record, waiting, left, said["found"], report)
                    elif waiting and not failed:  # its process ended before it was measured
                        _add(record, waiting, left, {"error": f"its process ended with {said['code']}"}, report)
            except OutOfTime:
                return left
    return left


def _add(record: Record, waiting: list[Case], left: list[Case], found: dict[str, Any], report: Callable) -> None:
    """Record what was found of the case that was waited for."""
    case = waiting.pop(0)
    left.remove(case)
    record.add(case, found)
    report(line(case.name, found))
