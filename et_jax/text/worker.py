"""A separate process for work that may hang, fill memory, or crash: it can be stopped safely."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError

MEMORY_BYTES = 2**30  # address space of a worker, where the system can limit it
START_SECONDS = 60.0  # to import a library, on a busy machine
MAX_MESSAGE_BYTES = 64 * 2**20  # of a question, and of an answer
_LENGTH = struct.Struct("<Q")
_WATCHED = Path(__file__).with_name("watched.py")


class Stopped(Exception):
    """The worker did not answer: it took too long, or it ended."""


class Worker:
    """Runs a program of this folder and asks it, in JSON over pipes; one question at a time.

    It starts with the first question, and again after it was stopped. It is a plain program, not a fork of
    this process: it imports neither JAX nor the caller's main module, and a Ctrl-C does not reach it. It ends
    with this process, however that ends.
    """

    def __init__(self, program: str, opening: dict[str, Any]) -> None:
        self._program, self._opening = Path(__file__).with_name(program), opening
        self._process: subprocess.Popen[bytes] | None = None
        self._finish = weakref.finalize(self, lambda: None)
        self._owner = 0

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer. Raises Stopped without one after `seconds`."""
        data = json.dumps(question).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise UsageError(f"The messages have {len(data)} bytes and at most {MAX_MESSAGE_BYTES} are read.")
        process = self._running()
        try:
            return _exchange(process, data, seconds)
        except BaseException:  # a Ctrl-C too: a late answer would be taken for the next one
            self.close()
            raise

    def close(self) -> None:
        """End the process, if it runs; the next question starts another."""
        self._process = None
        self._finish()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if necessary. One that a parent process started before a fork is not ours."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        if not sys.executable:
            raise UsageError("Python does not know its own program (sys.executable); run in an ordinary interpreter.")
        # The paths that this process imports from, without the program's folder and the current one.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_WATCHED), str(self._program), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"A helper process cannot be started ({error.strerror}); free some memory.") from error
        self._finish = weakref.finalize(self, _end, process, os.getpid())
        self._process, self._owner = process, os.getpid()
        try:
            _exchange(process, json.dumps(self._opening | {"memory": MEMORY_BYTES}).encode(), START_SECONDS)
        except Stopped as error:
            self.close()
            raise UsageError(f"The helper process {self._program.name} {error} when it started; try again.") from error
        return process


def _exchange(process: subprocess.Popen[bytes], data: bytes, seconds: float) -> dict[str, Any]:
    late, reply = threading.Event(), b""

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(_LENGTH.pack(len(data)) + data)  # pyright: ignore[reportOptionalMemberAccess]
        process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        head = process.stdout.read(_LENGTH.size)  # pyright: ignore[reportOptionalMemberAccess]
        size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if size <= MAX_MESSAGE_BYTES:
            reply = process.stdout.read(size)  # pyright: ignore[reportOptionalMemberAccess]
    except OSError:
        reply = b""
    finally:
        timer.cancel()
    if late.is_set() or not reply:
        raise Stopped(f"took more than {seconds:g} s" if late.is_set() else "ended its process")
    return json.loads(reply)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Stop a process and wait for its end; in a fork of the process that started it, do nothing.

    The garbage collector may call this in a thread that is polling the process, so it takes no
    lock, unlike `process.wait`, and its wait is bounded.
    """
    if os.getpid() != owner:
        return
    process.kill()
    for _ in range(1000):
        if process.poll() is not None:
            break
        time.sleep(0.001)
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unread input cannot be flushed any more
            stream.close()  # pyright: ignore[reportOptionalMemberAccess]
