"""Arms timed in turns: what slows the machine for a while slows them alike, and ratios are taken round by round."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Round = Callable[[], Mapping[str, float]]
"""Runs an arm once, and returns the figures of that round."""


def in_turns(arms: Mapping[str, Round], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return by arm the figures of every round, in which each arm runs once.

    A round before the first is not counted: it compiles. Every second round goes backwards, so that no arm always
    follows the same one.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    for number in range(rounds + 1):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            figures = arms[name]()
            for figure, one in figures.items() if number else ():
                found[name].setdefault(figure, []).append(float(one))
    return found


def seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds from a call until what it returns is computed; `time.process_time` adds those of all cores."""
    began = clock()
    jax.block_until_ready(run())
    return clock() - began
