"""A place in the output of a cell: rewritten, not too often, and the last drawing always stays."""

import sys
from types import SimpleNamespace

import pytest

from et_jax.io import bar, cell


class Screen:
    """Stands for IPython: keeps what each place shows, and counts drawings."""

    def __init__(self) -> None:
        self.places: list[dict[str, str]] = []
        self.drawings = 0

    def display(self, shown: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id
        place = len(self.places)
        self.places.append({})

        def update(shown: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.drawings += 1
            self.places[place] = shown

        update(shown, raw=True)
        return SimpleNamespace(update=update)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A screen in the place of IPython's, beside a clock that stands still."""
    shown = Screen()
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.display))
    monkeypatch.setattr(cell.time, "monotonic", lambda: 100.0)
    return shown


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)]
)
def test_a_kernel_is_a_notebook_and_a_terminal_is_not(shell, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert cell.in_notebook() == expected


def test_without_ipython_there_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not cell.in_notebook()


def test_a_place_is_rewritten_ten_times_a_second_and_at_the_end(screen, monkeypatch):
    area = cell.Area()
    for i in range(100):  # within two seconds
        monkeypatch.setattr(cell.time, "monotonic", lambda now=i / 50: 100.0 + now)
        area.draw(lambda at=i: (f"<b>{at}</b>", f"{at}"))
    assert 15 <= screen.drawings <= 21
    area.draw(lambda: ("<b>end</b>", "end"), last=True)
    assert screen.places == [{"text/html": "<b>end</b>", "text/plain": "end"}]


def test_a_bar_ends_full_in_one_place(screen):
    with bar.Bar(3) as shown:
        for _ in range(3):
            shown.count(token=True, ended=True)
    [place] = screen.places
    assert '<progress value="3" max="3">' in place["text/html"] and place["text/plain"].startswith("3/3 ")
    assert screen.drawings == 2  # the clock stands still: the first and the last
