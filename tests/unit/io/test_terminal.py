"""Escapes go to terminals that take them, from all that shows progress."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable

import pytest

from et_jax.batch.progress import Progress
from et_jax.io.bar import Bar
from et_jax.report.display import Status


def shown_by(show: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal receives while `show` runs."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(there, "w") as terminal, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        show()
        terminal.write("end")
    received = b""
    while not received.endswith(b"end"):
        received += os.read(here, 4096)
    os.close(here)
    return received.decode().removesuffix("end")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
    ],
)
def test_escapes_go_to_terminals_that_take_them(environment, expected, monkeypatch):
    def show() -> None:
        status = Status()
        status.show("loading")
        status.clear()
        with Bar(2), Progress(2, 0) as progress:
            progress.show(1, 1, 1)

    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = shown_by(show, monkeypatch)
    assert "loading" in shown and ("\x1b" in shown) == expected
