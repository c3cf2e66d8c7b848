"""Programs that serve few sequences: which of them a burst runs, and when one more is made.

On a CPU a step takes about as long as it has rows, whether sequences stand in them or not. So where few run, a program
of fewer rows does what that of all rows does to them, bit for bit, in less time. Another thread makes it: at once where
an earlier process has kept it, else as soon as the bursts that it would have served have taken as long as the program
of all rows took to make. So making it costs no more than what it would have spared till then, as far as that can be
known without knowing what is still to come.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from et_jax.decode.config import Variant
from et_jax.decode.decoder import Decoder
from et_jax.io import later
from et_jax.models.module import ModuleModel
from et_jax.serve.programs.executables import Kept

_LOG = logging.getLogger(__name__)


class FewRows:
    """The programs of few rows that there are beside a `whole` one of a decoder, on a platform: none but on a CPU.

    None are for a module of the caller's own, whose products may round in another way over fewer rows, and none where
    programs cannot be kept.
    """

    def __init__(self, decoder: Decoder, whole: Variant, platform: str) -> None:
        self._whole = decoder.variants[whole]
        self._programs: Mapping[int, Kept] = {}
        if platform == "cpu" and not isinstance(decoder.config.model, ModuleModel):
            few = {v.rows: one for v, one in decoder.variants.items() if v._replace(rows=whole.rows) == whole != v}
            self._programs = {rows: one for rows, one in sorted(few.items()) if isinstance(one, Kept)}
        self._missed = dict.fromkeys(self._programs, 0.0)  # seconds of bursts that each would have served
        self._made: dict[int, Future[object]] = {}

    @property
    def making(self) -> bool:
        """Whether one is being made."""
        return any(not made.done() for made in self._made.values())

    def chosen(self, running: int) -> int | None:
        """Return the rows of the program for a burst of so many sequences; None where it is that of all rows."""
        for rows, program in self._programs.items():
            if rows >= running and rows in self._made and self._made[rows].done() and program.ready:
                return rows
        return None

    def note(self, running: int, rows: int, seconds: float, *asked: Any) -> None:
        """Note how long a burst of so many sequences took in `rows`; have a program of fewer made if it is time.

        The arguments that it is made for are those `asked`.
        """
        wanted = next((one for one in self._programs if one >= running), rows)
        if wanted >= rows or wanted in self._made:
            return
        program, first = self._programs[wanted], not self._missed[wanted]
        self._missed[wanted] += seconds
        price = self._whole.seconds if isinstance(self._whole, Kept) else None
        if (price is not None and self._missed[wanted] >= price) or (first and program.is_kept(*asked)):
            worker = later.worker(lasting=False)
            self._made[wanted] = worker.submit(self._make, wanted, program.ahead(*asked))
            worker.shutdown(wait=False)

    def _make(self, rows: int, make: Callable[[], object]) -> None:
        try:
            make()
        except Exception as error:  # whatever a compiler says; texts go on without it
            _LOG.warning(
                f"The program of {rows} rows cannot be made ({type(error).__name__}: {error}); it is not used."
            )
            self._programs = {n: program for n, program in self._programs.items() if n != rows}
