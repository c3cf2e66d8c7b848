"""Which sequences are admitted to slots, and which are preempted when pages run out. Pure functions.

Of the sequences in slots the device chooses those that a step serves, by the priority rule. Here it is decided which
ones have a slot: waiting sequences in the order of `rank`, and those that had to give up a slot before them.

A sequence is read through `Waiting` and `Running`, the pages through `Pages`; nothing of them is changed.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

AGING_SECONDS = 60.0  # a wait this long is worth one unit of a request's priority


@runtime_checkable
class Waiting(Protocol):
    """A sequence that wants a slot.

    `priority` is what its caller asked for, higher is sooner; `deadline` the seconds after its arrival by which it
    should be done, None for none; `arrived` when it came, by the clock that `now` is read from; `arrival` the number
    in order. `num_tokens` are its prompt's and those produced, less what compression left out. `resumes` says that it
    was decoding in a slot before.
    """

    @property
    def priority(self) -> float: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def arrival(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def resumes(self) -> bool: ...


@runtime_checkable
class Running(Protocol):
    """A sequence in a slot; `turn` is its number in the order of admission."""

    @property
    def slot(self) -> int | None: ...
    @property
    def turn(self) -> int: ...


@runtime_checkable
class Pages(Protocol):
    """What counts the pages: see `page_pool.PagePool`."""

    @property
    def num_available(self) -> int: ...
    def pages_for(self, num_tokens: int) -> int: ...
    def num_freed(self, slot: int) -> int: ...


W = TypeVar("W", bound=Waiting)
R = TypeVar("R", bound=Running)


def urgency(priority: float, deadline: float | None, waited: float) -> float:
    """Return the priority asked for, plus the share of the time until the deadline that has passed, at most 1."""
    return priority + (0.0 if deadline is None else min(waited / deadline, 1.0))


def rank(sequence: Waiting, now: float) -> tuple[bool, float, int]:
    """Return the key by which waiting sequences are sorted, the least first.

    Those that resume come first. Then urgency counts, one unit of it as much as a wait of AGING_SECONDS, so that a
    request of priority p is passed only by those of priority q > p that come within (q - p + 1) AGING_SECONDS of it;
    the 1 is for deadlines. Then the order of arrival.
    """
    waited = now - sequence.arrived
    score = urgency(sequence.priority, sequence.deadline, waited) + waited / AGING_SECONDS
    return not sequence.resumes, -score if not sequence.resumes else 0.0, sequence.arrival


def admitted(waiting: Sequence[W], pages: Pages, *, now: float, num_slots: int, num_running: int) -> list[W]:
    """Return the sequences to admit now, in that order, to at most `num_slots` free slots.

    One that does not fit holds back those behind it, so that none is overtaken for being large. A page is left for
    every sequence in a slot, of which there are `num_running`, so that it need not be preempted at once.
    """
    chosen: list[W] = []
    num_pages = pages.num_available
    for sequence in sorted(waiting, key=lambda one: rank(one, now)):
        needed = pages.pages_for(sequence.num_tokens)
        if len(chosen) == num_slots or needed + num_running + len(chosen) > num_pages:
            break
        chosen.append(sequence)
        num_pages -= needed
    return chosen


def preempted(running: Sequence[R], pages: Pages, priority: Mapping[int, float], short: int) -> list[R]:
    """Return the sequences to preempt, lowest priority first, until `short` pages are freed.

    `priority` is that of every slot as the device last scored it. Of equals the last to be admitted goes first. The
    highest is never preempted, so that one sequence always advances and ends.
    """
    chosen: list[R] = []
    by_slot = [(sequence.slot, sequence) for sequence in running if sequence.slot is not None]
    by_slot.sort(key=lambda pair: (priority[pair[0]], -pair[1].turn))
    for slot, sequence in by_slot[:-1]:
        if short <= 0:
            break
        chosen.append(sequence)
        short -= pages.num_freed(slot)
    return chosen
