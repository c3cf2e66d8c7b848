"""What a running job says: only what it can know."""

import sys

import pytest

from et_jax.batch import progress as progresses
from et_jax.batch.progress import Progress


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hand = Clock()
    monkeypatch.setattr(progresses, "time", hand)
    return hand


def said(capfd: pytest.CaptureFixture[str]) -> str:
    lines = capfd.readouterr().err.splitlines()
    return lines[-1] if lines else ""


def test_the_time_left_is_that_of_lines_like_those_answered(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(110, 10) as progress:
        clock.now += 20
        progress.show(done=15, answered=5, tokens=40)
        assert said(capfd) == "15 of 110 lines, 2.0 tokens/s, 6 min 20 s left"  # 95 lines of 4 s
        clock.now += 60
        progress.show(done=15, answered=5, tokens=40)
        assert said(capfd) == "15 of 110 lines, 0.5 tokens/s, 25 min 20 s left"


def test_error_rows_say_nothing_of_the_time_left(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(1000, 0) as progress:
        clock.now += 20
        progress.show(done=999, answered=0, tokens=0)
        assert said(capfd) == "999 of 1000 lines"
        clock.now += 20
        progress.show(done=999, answered=1, tokens=40)
        assert said(capfd) == "999 of 1000 lines, 1.0 tokens/s, 40 s left"


def test_no_time_is_left_only_when_nothing_is(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(101, 0) as progress:
        clock.now += 20
        progress.show(done=100, answered=100, tokens=4000)
        assert said(capfd) == "100 of 101 lines, 200.0 tokens/s, under 1 s left"
        clock.now += 300  # the last line is long: no line of 3 s is to be expected any more
        progress.show(done=100, answered=100, tokens=4000)
        assert said(capfd) == "100 of 101 lines, 12.5 tokens/s"
        clock.now += 20
        progress.show(done=101, answered=101, tokens=6000)
        assert said(capfd) == "101 of 101 lines, 17.6 tokens/s"


def test_the_first_moments_say_nothing(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progresses, "LINE_SECONDS", 0.0)
    with Progress(5000, 0) as progress:
        clock.now += 0.5
        progress.show(done=1, answered=1, tokens=8)
        assert said(capfd) == "1 of 5000 lines, 16.0 tokens/s"


def test_a_dumb_terminal_gets_lines(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(10, 0) as progress:
        clock.now += 20
        progress.show(done=1, answered=1, tokens=8)
    err = capfd.readouterr().err
    assert "1 of 10 lines" in err and "\x1b" not in err and "\r" not in err
