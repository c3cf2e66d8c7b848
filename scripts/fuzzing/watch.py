"""A worker process runs the cases of a target; its parent limits its time and memory, and restarts it."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from et_jax.errors import UsageError

ACCEPTED, REFUSED = "accepted", "refused"
FAILURES = {
    "traceback": "an exception other than UsageError",
    "sentence": "a refusal that is not one sentence",
    "hang": "no end within the limit, twice",
    "memory": "more memory than the limit",
    "crash": "the process ended",
    "neighbour": "a valid neighbour has another result than alone",
    "rows": "a line without exactly one row, or a second run that adds something",
    "silent": "damage was accepted without a word",
    "escape": "the case reached something outside its folder",
    "noise": "pages of output besides the sentence",
}
SECONDS, MEMORY = 10.0, 2 * 2**30  # limits of a case, the memory in bytes
COMPILING = 120.0  # seconds of a case that compiles programs of its own, on a busy machine
LONGEST, NOISE, DETAIL = 600, 2000, 400  # characters of a refusal; bytes of other output; characters of a detail
STARTING = 300.0  # seconds for imports, a small model and its programs
POLL = 0.05  # seconds between readings of its memory
DUMP = 1.0  # seconds for a hanging process to write its stack
PR_SET_PDEATHSIG = 1


class Fault(Exception):
    """A failure of a case; `outcome` is one of `FAILURES`."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def draw(target: ModuleType, seed: int, number: int) -> dict[str, Any]:
    """Return a case, which depends on its target, seed and number alone."""
    return target.draw(random.Random(f"{seed}/{target.__name__}/{number}"))


def verdict(run: Callable[..., str], case: dict[str, Any]) -> tuple[str, str]:
    """Run a case and return its outcome with a detail."""
    try:
        outcome, detail = run(**{name: value for name, value in case.items() if name != "seconds"}), ""
    except UsageError as error:
        problem = not_a_sentence(str(error))
        outcome, detail = ("sentence", f"{problem}: {error}") if problem else (REFUSED, str(error))
    except Fault as fault:
        outcome, detail = fault.outcome, str(fault)
    except BaseException as error:  # a panic of a library is not an Exception
        outcome, detail = "traceback", f"{_where(error)}: {type(error).__name__}: {error}"
    return outcome, shortened(detail)


def _where(error: BaseException) -> str:
    """Return where an exception was raised, and the last place in the package before it."""
    frames = traceback.extract_tb(error.__traceback__)
    package = [frame for frame in frames if "/et_jax/" in frame.filename.rpartition("/site-packages/")[2]]
    names = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in (frames[-1], *package[-1:])]
    return " < ".join(dict.fromkeys(names))


def not_a_sentence(message: str) -> str | None:
    """Return why a message is no single printable sentence, None where it is one."""
    problems = {
        "does not end with a full stop": not message.endswith("."),
        "has more than one line": "\n" in message or "\r" in message,
        f"has {len(message)} characters": len(message) > LONGEST,
        "cannot be printed": any(unicodedata.category(letter) in ("Cc", "Cs") for letter in message),
    }
    return next((problem for problem, present in problems.items() if present), None)


def shortened(text: str) -> str:
    """Return a detail for the report: one line of ASCII."""
    line = " ".join(text[:4000].encode("ascii", "backslashreplace").decode().split())
    return line if len(line) <= DETAIL else f"{line[: DETAIL // 2]} ... {line[-DETAIL // 2 :]}"


def resident(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return a process's resident memory in bytes, or its peak (`VmHWM`); 0 where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def _work(pipe: Connection, module: str, seed: int, folder: Path) -> None:
    """Run the cases whose numbers arrive. Their output goes to a file, whose size is measured."""
    os.setsid()  # Ctrl-C is for the parent; the processes that a case starts end with the worker
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and the worker with its parent
    faulthandler.register(signal.SIGUSR1, file=(folder / "hanging.txt").open("w+"), all_threads=False)
    output = os.open(folder / "output.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    target = importlib.import_module(module)
    run = target.prepare(folder)
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            case = draw(target, seed, pipe.recv())
            os.ftruncate(output, 0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = resident()
            pipe.send((case.get("seconds", SECONDS), before))
            outcome, detail = verdict(run, case)
            peak = resident(field="VmHWM") - before
            gc.collect()  # destructors may complain
            sys.stdout.flush()
            sys.stderr.flush()
            size = os.fstat(output).st_size
            if size > NOISE and outcome in (ACCEPTED, REFUSED):
                start = os.pread(output, NOISE, 0).decode(errors="replace")
                outcome, detail = "noise", shortened(f"{size} bytes of output: {start}")
            pipe.send((outcome, detail, peak))


class Worker:
    """A worker process of one target, restarted after a case that ends it or exceeds a limit."""

    def __init__(self, module: str, seed: int, folder: Path, memory: int) -> None:
        self._given, self._folder, self._memory = (module, seed, folder), folder, memory
        self._process: Any = None

    def run(self, number: int) -> tuple[str, str]:
        """Run one case and return its outcome and detail."""
        if self._process is None:
            self._start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended between two cases
                self._pipe.send(number)
            limit, before = self._answer(STARTING)
            outcome, detail, peak = self._answer(limit, before + self._memory)
        except Fault as fault:
            self.close()
            return fault.outcome, str(fault)
        if outcome in (ACCEPTED, REFUSED) and peak > self._memory:
            return "memory", f"{peak / 1e9:.1f} GB at its peak"
        return outcome, detail

    def close(self) -> None:
        """Kill the process and those that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        os.environ["RUST_BACKTRACE"] = "0"
        self._process = context.Process(target=_work, args=(theirs, *self._given))
        self._process.start()
        theirs.close()
        try:
            self._answer(STARTING)
        except Fault as fault:
            output = (self._folder / "output.txt").read_text(errors="replace")
            raise RuntimeError(f"the worker does not start, {fault.outcome} ({fault}): {output[-4000:]}") from fault

    def _answer(self, seconds: float, most: float = math.inf) -> Any:
        """Wait for an answer. Raises Fault past the seconds, above `most` bytes, or where the process ends."""
        deadline = time.monotonic() + seconds
        while not self._pipe.poll(POLL):
            if time.monotonic() > deadline:
                os.kill(self._process.pid, signal.SIGUSR1)
                time.sleep(DUMP)
                frames = (self._folder / "hanging.txt").read_text(errors="replace").splitlines()[1:5]
                raise Fault("hang", shortened(" < ".join(map(str.strip, frames))))
            if (used := sum(map(resident, _family(self._process.pid)))) > most:
                raise Fault("memory", f"killed at {used / 1e9:.1f} GB")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise Fault("crash", f"exit code {self._process.exitcode}") from None


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return [pid, *(each for children in lists for child in children.split() for each in _family(int(child)))]


def run_cases(module: str, seed: int, numbers: Sequence[int], memory: int = MEMORY) -> Iterator[dict[str, Any]]:
    """Yield a row for every case as it ends: number, outcome, detail, seconds.

    A case that hangs is run once more in a new worker, since other work on the machine can slow it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        contextlib.closing(Worker(module, seed, Path(folder), memory)) as worker,
    ):
        for number in numbers:
            began = time.monotonic()
            outcome, detail = worker.run(number)
            if outcome == "hang":
                began = time.monotonic()
                outcome, detail = worker.run(number)
            seconds = round(time.monotonic() - began, 3)
            yield {"number": number, "outcome": outcome, "detail": detail, "seconds": seconds}
