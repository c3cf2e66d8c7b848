"""Escapes go to terminals that take them, from all that shows progress."""

import io
import os
import pty
import sys

import pytest

from et_jax.batch.progress import Progress
from et_jax.io.bar import Bar
from et_jax.io.terminal import takes_escapes
from et_jax.report.display import Status


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
def test_escapes_go_to_terminals_that_take_them(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    here, there = pty.openpty()
    with open(there, "w") as terminal, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        status = Status()
        status.tell("loading")
        status.clear()
        with Bar(2), Progress(2, 0) as progress:
            progress.show(1, 1, 1)
        terminal.write("end")
    shown = b""
    while not shown.endswith(b"end"):
        shown += os.read(here, 4096)
    os.close(here)
    assert b"loading" in shown and (b"\x1b" in shown) == expected


def test_a_stream_that_is_no_terminal_gets_no_escapes() -> None:
    assert not takes_escapes(io.StringIO()) and not takes_escapes(None)
