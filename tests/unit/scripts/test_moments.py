"""The moments at which a selection of blocks is made anew, in the experiment that compares them."""

import numpy as np

from scripts.experiments.refresh import greatest, ticks


def test_ticks_come_first_and_whenever_the_clock_enters_another_part():
    steps = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 4, 0, 0, 3, 1], [5, 1, 1, 1, 0, 0, 0, 0]], np.float32)
    at = [np.flatnonzero(row).tolist() for row in ticks(steps, 4)]
    assert at == [[0, 2, 4, 6], [0, 3, 6], [0, 2]]


def test_the_first_moment_and_those_of_the_greatest_scores():
    scores = np.array([[0.0, 3.0, 2.0, 3.0, 1.0]])
    assert [np.flatnonzero(greatest(scores, count)[0]).tolist() for count in (1, 2, 4)] == [[0], [0, 1], [0, 1, 2, 3]]
