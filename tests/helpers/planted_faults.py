"""A target for tests of the fuzzing itself: every case does one thing that must be noticed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from et_jax.errors import UsageError
from scripts.fuzzing.watch import ACCEPTED, Fault

VERDICTS = {
    "works": "accepted",
    "refuses": "refused",
    "hangs": "hang",
    "grows": "memory",
    "has it eaten": "memory",  # by a process of its own
    "raises": "traceback",
    "panics": "traceback",
    "eats": "memory",
    "dies": "crash",
    "prints": "noise",
    "rambles": "sentence",
    "harms": "neighbour",
}


def draw(random: Random) -> dict[str, Any]:
    return {"what": random.choice(list(VERDICTS)), "seconds": 1.0}


def prepare(folder: Path) -> Callable[..., str]:
    kept: list[bytearray] = []

    def run(what: str) -> str:
        match what:
            case "refuses":
                raise UsageError("The field a is 1; make it 2.")
            case "hangs":
                while True:
                    pass
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
