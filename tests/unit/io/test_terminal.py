"""Escapes go to terminals that take them, from all that shows progress; in a notebook one place is rewritten."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from et_jax.batch.progress import Progress
from et_jax.io import cell
from et_jax.io.bar import Bar
from et_jax.report.display import Status


def shown_by(show: Callable[[], None], monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> str:
    """What a terminal receives while `show` runs."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
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
        status.tell("loading")
        status.clear()
        with Bar(2), Progress(2, 0) as progress:
            progress.show(1, 1, 1)

    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = shown_by(show, monkeypatch)
    assert "loading" in shown and ("\x1b" in shown) == expected


def test_a_status_takes_one_row_and_leaves_none(monkeypatch):
    """In a terminal of ten columns; what follows, an error or a text, begins on an empty row."""

    def show() -> None:
        with pytest.raises(ValueError, match="so"), Status() as status:
            status.tell("compiling everything")
            status.tell("読み込み中")
            raise ValueError("so")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = shown_by(show, monkeypatch, columns=10)
    assert shown == "\r\x1b[Kcompiling\r\r\x1b[K読み込み\r\r\x1b[K"  # nine cells, of which an ideograph takes two


def test_in_a_notebook_a_place_is_rewritten_ten_times_a_second_and_at_the_end(monkeypatch):
    """That a kernel's front end shows it stands in `report/test_notebook.py`; IPython in a terminal is no notebook."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not cell.in_notebook()
    shown: list[dict[str, str]] = []

    def display(first: dict[str, str], **_: bool) -> SimpleNamespace:
        shown.append(first)
        return SimpleNamespace(update=lambda next, raw: shown.append(next))

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    area = cell.Area()
    for i in range(100):  # within two seconds
        monkeypatch.setattr(cell.time, "monotonic", lambda now=i / 50: 100.0 + now)
        area.draw(lambda at=i: (f"<b>{at}</b>", f"{at}"))
    assert 15 <= len(shown) <= 21
    area.draw(lambda: ("<b>end</b>", "end"), last=True)
    assert shown[-1] == {"text/html": "<b>end</b>", "text/plain": "end"}
