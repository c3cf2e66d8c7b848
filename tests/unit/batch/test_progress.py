"""What a running job says: only what it can know."""

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


@pytest.mark.parametrize(
    ("total", "before", "shown"),
    [
        pytest.param(
            *(110, 10),
            [  # 95 lines of 4 s, then of 16 s
                (20, 15, 5, 40, "15 of 110 lines, 2.0 tokens/s, 6 min 20 s left"),
                (60, 15, 5, 40, "15 of 110 lines, 0.5 tokens/s, 25 min 20 s left"),
            ],
            id="the time left is that of lines like those answered",
        ),
        pytest.param(
            *(101, 0),
            [
                (20, 100, 100, 4000, "100 of 101 lines, 200.0 tokens/s, under 1 s left"),
                (300, 100, 100, 4000, "100 of 101 lines, 12.5 tokens/s"),  # the last line is longer than any other
                (20, 101, 101, 6000, "101 of 101 lines, 17.6 tokens/s"),
            ],
            id="no time is left only when no line is",
        ),
    ],
)
def test_what_is_said(clock, capfd, monkeypatch, total, before, shown):
    monkeypatch.setattr(progresses, "LINE_SECONDS", 0.0)
    with Progress(total, before) as progress:
        for seconds, done, answered, tokens, line in shown:
            clock.now += seconds
            progress.show(done=done, answered=answered, tokens=tokens)
            assert capfd.readouterr().err.splitlines()[-1] == line
