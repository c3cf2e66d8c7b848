"""A surface for tests of the fuzzing itself: every case does one thing that must be noticed."""

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fuzzing.cases import ACCEPTED, Fault, Surface
from hypothesis import strategies as st

from et_jax.errors import UsageError

FINE = ("works", "refuses")
WRONG = (
    "hangs",
    "is deaf",
    "grows",
    "has it eaten",
    "raises",
    "panics",
    "eats",
    "dies",
    "prints",
    "rambles",
    "harms",
)


def prepare(folder: Path) -> Callable[[str], str]:
    kept: list[bytearray] = []

    def run(case: str) -> str:
        match case:
            case "refuses":
                raise UsageError("The field a is 1; make it 2.")
            case "hangs":
                while True:
                    pass
            case "is deaf":
                faulthandler.cancel_dump_traceback_later()
                time.sleep(3600)
            case "grows":
                while True:
                    kept.append(bytearray(50 * 2**20))
            case "has it eaten":
                eater = "import time; kept = bytearray(260 * 2**20); time.sleep(3600)"
                subprocess.run([sys.executable, "-c", eater])
            case "raises":
                raise ValueError("wrong")
            case "panics":
                raise BaseException("a library gave up")
            case "eats":
                kept.append(bytearray(260 * 2**20))
                kept.clear()
            case "dies":
                os.abort()
            case "prints":
                os.write(2, b"warning: something\n" * 500)
            case "rambles":
                raise UsageError("This is long; " + "very " * 200 + "long.")
            case "harms":
                raise Fault("neighbour", "another text")
        return ACCEPTED

    return run


SURFACE = Surface(cases=st.sampled_from((*FINE, *WRONG)), prepare=prepare, seconds=lambda case: 1.0)
