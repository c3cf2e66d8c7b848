"""Who is admitted to the slots, and who leaves when pages run out. Plain values in, plain values out.

Among the sequences that sit in slots the device chooses whom a step serves, by the priority rule. Here it
is decided who sits: waiting sequences in the order of `rank`, and those that had to leave before them.
"""

import dataclasses
from collections.abc import Sequence

AGING_SECONDS = 60.0  # a wait this long is worth one unit of a request's priority


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """A sequence that wants a slot.

    `priority` is what its caller asked for, higher is sooner; `deadline` the seconds after its arrival
    by which it should be done, None for none; `waited` the seconds since then. `pages` is what it needs to
    start or to go on. `started` sequences have been in a slot before.
    """

    arrival: int
    priority: float
    deadline: float | None
    waited: float
    pages: int
    started: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A sequence in a slot: its priority as the device last scored it, and the pages that its leaving frees."""

    arrival: int
    priority: float
    pages: int


def urgency(priority: float, deadline: float | None, waited: float) -> float:
    """Return the priority asked for, plus the share of the time until the deadline that has passed, at most 1."""
    return priority + (0.0 if deadline is None else min(waited / deadline, 1.0))


def rank(sequence: Waiting) -> tuple[bool, float, int]:
    """Return the key by which waiting sequences are sorted, the least first.

    Those that had to leave a slot come first. Then urgency counts, one unit of it as much as a wait of
    AGING_SECONDS, so that a request of priority p is passed only by those of priority q > p that come
    within (q - p + 1) AGING_SECONDS of it; the 1 is for deadlines. Then the order of arrival.
    """
    score = urgency(sequence.priority, sequence.deadline, sequence.waited) + sequence.waited / AGING_SECONDS
    return not sequence.started, -score if not sequence.started else 0.0, sequence.arrival


def admitted(waiting: Sequence[Waiting], num_slots: int, num_pages: int, num_running: int) -> list[int]:
    """Return the indices of those to seat now, in that order, given free slots and free pages.

    One that does not fit holds back those behind it, so that no one is overtaken for being large. A page
    is left for every sequence running, so that it need not leave at once.
    """
    chosen: list[int] = []
    for index in sorted(range(len(waiting)), key=lambda i: rank(waiting[i])):
        needed = waiting[index].pages
        spare = num_running + len(chosen)
        if len(chosen) == num_slots or needed + spare > num_pages:
            break
        chosen.append(index)
        num_pages -= needed
    return chosen


def preempted(running: Sequence[Running], num_pages: int) -> list[int]:
    """Return the indices of those who leave, lowest priority first, until `num_pages` pages are freed.

    Of equals the last to arrive goes first. The highest never leaves, so that somebody always advances
    and ends.
    """
    chosen: list[int] = []
    order = sorted(range(len(running)), key=lambda i: (running[i].priority, -running[i].arrival))
    for index in order[:-1]:
        if num_pages <= 0:
            break
        chosen.append(index)
        num_pages -= running[index].pages
    return chosen
