"""A place in the output of a cell: rewritten, not too often, and the last drawing always stays."""

import sys
from types import SimpleNamespace

import pytest

from et_jax.io import bar, cell


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What IPython is asked to show in its one place, in order, beside a clock that stands still."""
    shown: list[dict[str, str]] = []

    def display(first: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id and not shown
        shown.append(first)
        return SimpleNamespace(update=lambda next, raw: shown.append(next))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(cell.time, "monotonic", lambda: 100.0)
    return shown


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)]
)
def test_a_kernel_is_a_notebook_and_a_terminal_is_not(shell, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert cell.in_notebook() == expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not cell.in_notebook()


def test_a_place_is_rewritten_ten_times_a_second_and_at_the_end(drawings, monkeypatch):
    area = cell.Area()
    for i in range(100):  # within two seconds
        monkeypatch.setattr(cell.time, "monotonic", lambda now=i / 50: 100.0 + now)
        area.draw(lambda at=i: (f"<b>{at}</b>", f"{at}"))
    assert 15 <= len(drawings) <= 21
    area.draw(lambda: ("<b>end</b>", "end"), last=True)
    assert drawings[-1] == {"text/html": "<b>end</b>", "text/plain": "end"}


def test_a_bar_ends_full_in_one_place(drawings):
    with bar.Bar(3) as shown:
        for _ in range(3):
            shown.count(token=True, ended=True)
    assert '<progress value="3" max="3">' in drawings[-1]["text/html"]
    assert drawings[-1]["text/plain"].startswith("3/3 ")
    assert len(drawings) == 2  # the clock stands still: the first and the last
