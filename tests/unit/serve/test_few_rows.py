"""Programs of few rows: which of them serves a burst, and when one is made."""

from typing import Any

from promised import Promised
from small_model import configuration

from et_jax.decode.decoder import decoder
from et_jax.models.config import ModelConfig
from et_jax.serve.programs import few_rows
from et_jax.serve.programs.few_rows import FewRows
from et_jax.types import replace


class Served:
    """Programs of 2 and 8 rows beside that of all 16, which took 2 seconds to make."""

    def __init__(self, platform: str = "cpu", **settings: Any) -> None:
        bound = decoder(configuration(num_slots=16, batch=16, num_pages=257))
        assert [one.rows for one in bound.variants] == [16, 2, 8]
        self.whole, self.eight = Promised("16", kept=False), Promised("8", kept=False)
        self.two = Promised("2", **{"kept": False} | settings)
        self.whole.seconds = 2.0
        programs = dict(zip(bound.variants, (self.whole, self.two, self.eight), strict=True))
        self.few = FewRows(replace(bound, variants=programs), bound.config.full_variant, platform)

    def burst(self, running: int, seconds: float) -> int:
        """Run one that takes so long, and return its rows."""
        rows = self.few.chosen(running) or 16
        self.few.record(running, rows, seconds, "weights", "state")
        return rows

    def made(self, program: Promised) -> None:
        """Have a program made that is being made, and wait for it."""
        assert self.few.making
        program.go.set()
        for made in self.few._made.values():
            made.exception(60)


def test_a_program_of_few_rows_is_made_once_its_bursts_took_as_long_as_that_of_all_took_to_make():
    served = Served()
    assert [served.burst(1, 0.75) for _ in range(2)] == [16, 16] and not served.few.making
    assert served.burst(9, 60.0) == 16 and not served.few.making  # which no other could have served
    assert served.burst(2, 0.5) == 16 and served.few.making
    assert served.burst(1, 60.0) == 16  # while it is made
    served.made(served.two)
    assert [served.burst(running, 0.1) for running in (1, 2, 3)] == [2, 2, 16]
    assert served.two.num_made == 1 and served.two.num_asked == 1  # whether it is kept is asked once
    assert served.two.made_for == ("weights", "state")


def test_a_program_that_is_kept_is_made_at_once_but_on_an_accelerator_or_for_a_module(monkeypatch):
    served = Served(kept=True)
    served.burst(1, 1e-3)
    served.made(served.two)
    assert served.burst(1, 1e-3) == 2
    others = [Served("gpu", kept=True), Served("tpu", kept=True)]
    monkeypatch.setattr(few_rows, "ModuleModel", ModelConfig)
    for served in (*others, Served(kept=True)):
        assert served.burst(1, 60.0) == 16 and not served.few.making and served.two.num_asked == 0


def test_where_a_program_cannot_be_made_texts_go_on_without_and_a_line_says_so(caplog):
    served = Served(kept=True, failure=MemoryError("no room"))
    served.burst(1, 1e-3)
    served.made(served.two)
    assert served.burst(1, 0.1) == 16 and served.two.num_made == 1
    assert "The program of 2 rows cannot be made (MemoryError: no room); it is not used." in caplog.text
