"""A process that ends while something is made for later loses nothing that it said, and waits for what lasts alone."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from et_jax.io import later

def made():
    time.sleep({seconds})
    print("made")

busy = later.worker(lasting={lasting})
busy.submit(made)
busy.shutdown(wait=False)
time.sleep(0.2)
print("said")
later.leave({code})
"""


def ended(**given) -> tuple[int, str, str]:
    command = [sys.executable, "-c", SCRIPT.format(**given)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_waits_for_nothing_that_passes(code):
    assert ended(seconds=600, lasting=False, code=code) == (code, "said\n", "")


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_waits_for_what_lasts_and_says_so(code):
    found, out, words = ended(seconds=2, lasting=True, code=code)
    assert (found, out) == (code, "said\nmade\n") and words.count("\n") == 1 and "Ctrl-C" in words


@pytest.mark.parametrize("lasting", [False, True])
def test_what_is_made_by_then_is_waited_for_by_nobody(lasting):
    assert ended(seconds=0, lasting=lasting, code=3) == (3, "made\nsaid\n", "")
