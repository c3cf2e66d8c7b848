"""A surface, the cases drawn for it, and the outcomes a case can have."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider
from hypothesis.strategies import SearchStrategy

ACCEPTED, REFUSED = "accepted", "refused"
FAILURES = {
    "traceback": "an exception that is no UsageError",
    "sentence": "a refusal that is not one sentence",
    "hang": "no end within the limit, twice",
    "memory": "more memory than the limit",
    "crash": "the process ended",
    "neighbour": "a well-formed neighbour has another text than alone",
    "rows": "a line without exactly one row, or a second run that adds something",
    "silent": "damage that was accepted without a word",
    "escape": "what is outside was reached",
    "noise": "pages of output besides the sentence",
}
SECONDS, MEMORY = 10.0, 2 * 2**30
COMPILING = 120.0  # seconds, for a case that compiles programs of its own, on a busy machine


class Fault(Exception):
    """What a surface found wrong by itself; `outcome` is one of `FAILURES`."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surface:
    """Where strangers' values come in.

    `cases` generates them; `prepare(folder)` returns the function that runs one, may write in `folder`, and
    answers "accepted" or "refused", or raises. A case that compiles a model may take longer than others:
    `seconds` gives each its limit.
    """

    cases: SearchStrategy[Any]
    prepare: Callable[[Path], Callable[[Any], str]]
    seconds: Callable[[Any], float] = lambda case: SECONDS


def draw(surface: Surface, seed: int, name: str, number: int) -> Any:
    """Return a case, by its seed, surface and number alone.

    Hypothesis's own draws prefer constants of the modules that happen to be loaded, and small numbers;
    here every choice is uniform.
    """
    random = Random(f"{seed}/{name}/{number}")

    class Uniform(PrimitiveProvider):
        def draw_boolean(self, p=0.5):
            return random.random() < p

        def draw_integer(self, min_value=None, max_value=None, *, weights=None, shrink_towards=0):
            assert min_value is not None and max_value is not None, "strategies here are bounded"
            return random.randint(min_value, max_value)

        def draw_float(self, *, min_value, max_value, allow_nan, smallest_nonzero_magnitude):
            raise NotImplementedError("sample floats from a list")

        def draw_string(self, intervals, *, min_size=0, max_size=0):
            raise NotImplementedError("sample texts from a list")

        def draw_bytes(self, min_size=0, max_size=0):
            return random.randbytes(random.randint(min_size, max_size))

    AVAILABLE_PROVIDERS["uniform"] = Uniform
    drawn = []

    @settings(
        backend="uniform",
        max_examples=2,  # the first is always the simplest there is
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
        derandomize=False,
    )
    @given(surface.cases)
    def keep(case: Any) -> None:
        drawn.append(case)

    keep()
    return drawn[-1]
