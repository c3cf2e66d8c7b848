"""The process in which cases run: numbers come in on standard input, verdicts go out, one JSON object per line.

    python -m fuzzing.worker MODULE NAME SEED FOLDER    (with scripts/ on the path)

Whatever a case prints goes to a file in FOLDER, so that it can be weighed. A case that outlives its limit
is ended by a timer below Python, which needs no lock of it and writes first where the case hangs.
"""

import faulthandler
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from fuzzing.cases import draw
from fuzzing.judge import NOISE, Verdict, judge, shortened


def resident(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return a process's resident memory in bytes, or its peak (`VmHWM`); 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Run the cases whose numbers come in, until no more come."""
    module, name, seed, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    output = os.open(folder / "output.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    surface = importlib.import_module(module).SURFACE
    run = surface.prepare(folder)
    gc.collect()
    gc.freeze()  # what is there now is not looked through again
    _say(answers, ready=True)
    with (folder / "hanging.txt").open("w+") as stack:
        for line in sys.stdin:
            number = int(line)
            case = draw(surface, seed, name, number)
            limit = surface.seconds(case)
            os.ftruncate(output, 0)
            stack.truncate(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before, began = resident(), time.monotonic()
            _say(answers, number=number, limit=limit, resident=before)
            faulthandler.dump_traceback_later(limit, exit=True, file=stack)
            verdict = judge(run, case)
            faulthandler.cancel_dump_traceback_later()
            seconds, peak = time.monotonic() - began, resident(field="VmHWM") - before
            gc.collect()  # what a failed case leaves behind may complain when it is thrown away
            verdict = _noisy(verdict, output)
            _say(answers, **vars(verdict), seconds=round(seconds, 3), memory=max(peak, 0))


def _noisy(verdict: Verdict, output: int) -> Verdict:
    """Return a verdict that counts the noise, where nothing worse has happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.fstat(output).st_size
    if size <= NOISE or verdict.outcome not in ("accepted", "refused"):
        return verdict
    start = os.pread(output, 2000, 0).decode(errors="replace")
    return Verdict(outcome="noise", detail=shortened(f"{size} bytes of output: {start}"))


def _say(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
