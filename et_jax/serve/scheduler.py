"""Which sequences are admitted to slots, and which are preempted when pages run out. Pure functions.

The scheduler decides which sequences have a slot: preempted ones first, then waiting ones in the order of `rank`. The
device decides, by the priority rule, which of the sequences in slots a step decodes.

The functions read sequences through `Waiting` and `Running`, and pages through `Pages`; they change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

AGING_SECONDS = 60.0  # a wait this long is worth one unit of a request's priority


@runtime_checkable
class Waiting(Protocol):
    """A sequence that waits for a slot.

    `priority` is the request's, higher is sooner. `deadline` is the seconds after its arrival by which it should be
    done, or None. `arrived` is its arrival time, by the clock of `now`; `arrival` is its number in order of arrival.
    `num_tokens` counts prompt and produced tokens, less those that compression dropped. `resumes` is True if it was
    preempted while decoding.
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
    """The accounting of pages, see `page_pool.PagePool`."""

    @property
    def num_available(self) -> int: ...
    def pages_for(self, num_tokens: int) -> int: ...
    def num_freed(self, slot: int) -> int: ...


W = TypeVar("W", bound=Waiting)
R = TypeVar("R", bound=Running)


def urgency(priority: float, deadline: float | None, waited: float) -> float:
    """Return the request's priority, plus the share of the time until its deadline that has passed, at most 1."""
    return priority + (0.0 if deadline is None else min(waited / deadline, 1.0))


def rank(sequence: Waiting, now: float) -> tuple[bool, float, int]:
    """Return the key by which waiting sequences are sorted, the least first.

    Preempted sequences come first. Then urgency counts, where a wait of AGING_SECONDS is worth one unit. So only
    requests of priority q > p that arrive within (q - p + 1) AGING_SECONDS can overtake a request of priority p; the 1
    is for deadlines. Ties are in order of arrival.
    """
    waited = now - sequence.arrived
    score = urgency(sequence.priority, sequence.deadline, waited) + waited / AGING_SECONDS
    return not sequence.resumes, -score if not sequence.resumes else 0.0, sequence.arrival


def admitted(waiting: Sequence[W], pages: Pages, *, now: float, num_slots: int, num_running: int) -> list[W]:
    """Return the sequences to admit now, in order of `rank`, to at most `num_slots` free slots.

    A sequence that does not fit blocks those behind it, so that no sequence is overtaken for being large. One page per
    running sequence (`num_running`, and those admitted here) stays free, so that none is preempted at once.
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

    `priority` has the device's last score of every slot. Of equal ones the last admitted is preempted first. The
    highest is never preempted, so that at least one sequence always advances to its end.
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
