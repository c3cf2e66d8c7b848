"""Programs with fewer rows for few sequences: which of them a burst runs, and when another is compiled.

On a CPU the time of a step is proportional to its rows, occupied or not. If few sequences run, a program with fewer
rows computes the same bits in less time. Another thread prepares it: at once if an earlier process has stored it,
otherwise when the bursts that it could have run have taken as long as the full program took to compile. This is the
rent-or-buy rule: the compilation starts only after a comparable time was spent without it.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from et_jax.decode.config import Variant
from et_jax.decode.decoder import Decoder
from et_jax.io import later
from et_jax.models.module import ModuleModel
from et_jax.serve.programs.executables import CachedProgram

_LOG = logging.getLogger(__name__)


class FewRows:
    """The programs with fewer rows than the full program `full` of a decoder. Only CPUs have them.

    There are none for a caller's own module, whose products may round differently over fewer rows, and none if programs
    cannot be stored.
    """

    def __init__(self, decoder: Decoder, full: Variant, platform: str) -> None:
        self._full = decoder.variants[full]
        self._programs: Mapping[int, CachedProgram] = {}
        if platform == "cpu" and not isinstance(decoder.config.model, ModuleModel):
            few = {v.rows: one for v, one in decoder.variants.items() if v._replace(rows=full.rows) == full != v}
            self._programs = {rows: one for rows, one in sorted(few.items()) if isinstance(one, CachedProgram)}
        self._missed = dict.fromkeys(self._programs, 0.0)  # seconds of bursts that each could have run
        self._made: dict[int, Future[object]] = {}

    @property
    def making(self) -> bool:
        """Whether a program is being compiled."""
        return any(not made.done() for made in self._made.values())

    def chosen(self, running: int) -> int | None:
        """Return the rows of the program for a burst of `running` sequences; None for the full program."""
        for rows, program in self._programs.items():
            if rows >= running and rows in self._made and self._made[rows].done() and program.ready:
                return rows
        return None

    def record(self, running: int, rows: int, seconds: float, *asked: Any) -> None:
        """Record the seconds of a burst of `running` sequences in `rows`; start compiling a smaller program if due.

        It is compiled for the arguments `asked`.
        """
        wanted = next((one for one in self._programs if one >= running), rows)
        if wanted >= rows or wanted in self._made:
            return
        program, first = self._programs[wanted], not self._missed[wanted]
        self._missed[wanted] += seconds
        price = self._full.seconds if isinstance(self._full, CachedProgram) else None
        if (price is not None and self._missed[wanted] >= price) or (first and program.is_cached(*asked)):
            worker = later.worker(lasting=False)
            self._made[wanted] = worker.submit(self._make, wanted, program.ahead(*asked))
            worker.shutdown(wait=False)

    def _make(self, rows: int, make: Callable[[], object]) -> None:
        try:
            make()
        except Exception as error:  # a compiler may raise anything; sequences continue without the program
            _LOG.warning(
                f"The program of {rows} rows cannot be made ({type(error).__name__}: {error}); it is not used."
            )
            self._programs = {n: program for n, program in self._programs.items() if n != rows}
