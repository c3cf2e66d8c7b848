"""The parent's side: a worker that is watched, killed and started anew, and the file of the cases that are done."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import MEMORY
from fuzzing.judge import shortened
from fuzzing.worker import resident

_STARTING = 300.0  # seconds for imports, a small model and its programs
_GRACE = 2.0  # seconds after its limit in which a worker may end by itself
_LOOK = 0.05  # seconds between two looks at its memory


class WorkerLost(Exception):
    """The worker has ended or was killed: the outcome of its case, and what is known of it."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class Worker:
    """One worker process for one surface. Raises WorkerLost where a case takes it along."""

    def __init__(self, module: str, name: str, seed: int, folder: Path, memory: int) -> None:
        self._folder, self._memory = folder, memory
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzzing.worker", module, name, str(seed), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "RUST_BACKTRACE": "0"},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent; what the worker starts ends with it
        )
        self._pending = b""
        try:
            self._answer(time.monotonic() + _STARTING, None)
        except WorkerLost as lost:
            output = (folder / "output.txt").read_text(errors="replace")
            raise RuntimeError(f"the worker for {name} does not start ({lost}): {output[-4000:]}") from lost

    def run(self, number: int) -> dict[str, Any]:
        """Run one case and return its verdict."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n".encode())
        except BrokenPipeError as error:
            raise WorkerLost("crash", "ended between two cases") from error
        begun = self._answer(time.monotonic() + _STARTING, None)
        most = begun["resident"] + self._memory
        verdict = self._answer(time.monotonic() + begun["limit"] + _GRACE, most)
        if verdict["outcome"] in ("accepted", "refused") and verdict["memory"] > self._memory:
            verdict |= {"outcome": "memory", "detail": f"{verdict['memory'] / 1e9:.1f} GB at its peak"}
        return verdict

    def end(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, deadline: float, most: int | None) -> dict[str, Any]:
        """Wait for a line; past the deadline, or the most memory, the worker is killed."""
        assert self._process.stdout is not None
        while b"\n" not in self._pending:
            if time.monotonic() > deadline:
                self.end()
                raise WorkerLost("hang", self._where())
            if most is not None and (held := self._resident()) > most:
                self.end()
                raise WorkerLost("memory", f"killed at {held / 1e9:.1f} GB")
            if not select.select([self._process.stdout], [], [], _LOOK)[0]:
                continue
            piece = self._process.stdout.read(65536)
            if not piece:
                code = self._process.wait()
                self.end()
                if where := self._where():
                    raise WorkerLost("hang", where)
                raise WorkerLost("crash", f"exit code {code}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _resident(self) -> int:
        return sum(map(resident, _family(self._process.pid)))

    def _where(self) -> str:
        """Return where the timer found the worker, innermost first; empty where it did not go off."""
        file = self._folder / "hanging.txt"
        text = file.read_text(errors="replace") if file.exists() else ""
        main = text.rpartition("(most recent call first):")[2].strip().splitlines()  # the oldest thread comes last
        return shortened(" < ".join(line.strip() for line in main[:4]))


def _family(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended, and its pipe will say so
        return []
    return [pid, *(each for children in lists for child in children.split() for each in _family(int(child)))]


def run_cases(
    module: str,
    name: str,
    seed: int,
    numbers: Sequence[int],
    *,
    memory: int = MEMORY,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every case as it ends: surface, number, outcome, detail, seconds.

    A case that hangs is run once more in a new worker, since other work on the machine can slow it.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.ExitStack() as stack:

        def start() -> Worker:
            started = Worker(module, name, seed, Path(folder), memory)
            stack.callback(started.end)
            return started

        worker = None
        for number in numbers:
            for attempt in (1, 2):
                worker, began = worker or start(), time.monotonic()
                try:
                    verdict = worker.run(number)
                except WorkerLost as lost:
                    worker = None
                    seconds = round(time.monotonic() - began, 3)
                    verdict = {"outcome": lost.outcome, "detail": lost.detail, "seconds": seconds}
                    tell(f"{name}:{number}: {lost.outcome}; the worker starts anew")
                if verdict["outcome"] != "hang" or attempt == 2:
                    yield {"surface": name, "number": number} | verdict
                    break


@dataclasses.dataclass(frozen=True, kw_only=True)
class Campaign:
    """A seed and the code it is run on: rows of another one are not gone on with."""

    seed: int
    code: str


class Done:
    """The file of cases that are done, one row each; a killed run goes on after the last whole one.

    Raises ValueError where the file belongs to another campaign.
    """

    def __init__(self, path: Path, campaign: Campaign) -> None:
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        head, whole = None, 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            row = json.loads(line)
            if head is None:
                head = row
            else:
                self.rows[row["surface"], row["number"]] = row
        self._file.truncate(whole)
        if head is None:
            self._write(dataclasses.asdict(campaign))
        elif head != dataclasses.asdict(campaign):
            raise ValueError(f"{path} holds cases of another seed or of other code; delete it, or name another --work.")

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row; it is on its way to the disk when this returns."""
        self.rows[row["surface"], row["number"]] = row
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()


def code_digest() -> str:
    """Return a digest of the package and of the cases: verdicts belong to them alone."""
    spec = importlib.util.find_spec("et_jax")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for folder in (Path(spec.origin).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
