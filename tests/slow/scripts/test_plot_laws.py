"""The figure of aging, against its bound."""

from scripts_here import script


def test_the_adversary_never_makes_anyone_wait_longer_than_the_bound():
    laws = script("plot_laws")
    for rate, runnable, served in ((0.1, 5, 1), (0.5, 8, 2), (1.0, 6, 3)):
        seen = int(laws.waits(rate, 2.0, runnable, served, 100).max())
        assert 1 < seen <= laws.priority.waiting_bound(2.0, rate, runnable, served)
