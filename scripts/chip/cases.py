"""What is measured: cases, in the order in which they are run, and the settings of a run."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from et_jax.errors import UsageError
from scripts.measuring.experiment import Base, setting

PAGE_SIZE = 64
ROOM = 192  # tokens of a sequence beyond its context: those of warm-ups, rounds and profiles
CHOOSING = ("paper", "certified", "adaptive")  # presets that choose blocks by a tolerance
CONTROLS = ("off", "quest", *CHOOSING)
QUEST = 1 / 8  # of the blocks
SELF = "self-drafts"
LLAMA, SMOLLM = "llama-3-8b", "smollm-135m"
SIZES = ((8, 32_768), (4, 32_768), (1, 32_768), (16, 8192))  # sequences, tokens of each


class Settings(Base):
    """Flags of the experiment."""

    cases: tuple[str, ...] = setting((), "those whose names contain one of these texts, else all")
    steps: int = setting(16, "steps of a call", least=3, quick=4)
    rounds: int = setting(3, "calls that are timed", least=3)
    drafted: int = setting(4, "tokens that a sequence drafts in a step", least=1)
    profile: bool = setting(False, "count the kernels of a step")
    tiny: bool = setting(False, "tiny shapes, on a CPU too", quick=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A decode step: by `engine`, of a shape, of `rows` sequences of so many `tokens`, under a control."""

    engine: Literal["decode", "torch"]
    shape: str
    rows: int
    tokens: int
    control: str = "off"

    @property
    def name(self) -> str:
        """How `--cases` knows it."""
        return f"{self.engine} {self.shape} {self.rows}x{self.tokens} {self.control}"


def cases_of(settings: Settings, with_torch: bool) -> list[Case]:
    """Return every case, those that tell most first."""
    if settings.tiny:
        tiny = {"shape": "small", "rows": 1, "tokens": 512}
        return [Case(engine="decode", control=one, **tiny) for one in ("off", "certified")]
    found = []
    for rows, tokens in SIZES:
        controls = (*CONTROLS, SELF) if (rows, tokens) == SIZES[0] else CONTROLS
        found += [Case(engine="decode", shape=LLAMA, rows=rows, tokens=tokens, control=one) for one in controls]
    found.append(Case(engine="decode", shape=SMOLLM, rows=1, tokens=2048))
    if with_torch:
        found += [Case(engine="torch", shape=LLAMA, rows=rows, tokens=tokens) for rows, tokens in SIZES]
        found.append(Case(engine="torch", shape=SMOLLM, rows=1, tokens=2048))
    return found


def chosen(cases: Sequence[Case], words: Sequence[str]) -> list[Case]:
    """Return the cases whose names contain one of these texts, all of them without a text.

    Raises UsageError for a text that no name contains.
    """
    for word in words:
        if not any(word in case.name for case in cases):
            names = ", ".join(case.name for case in cases)
            raise UsageError(f"--cases is {word!r}, which no case contains; the cases are {names}.")
    return [case for case in cases if not words or any(word in case.name for word in words)]
