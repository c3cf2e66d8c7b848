"""A process that ends while something is made for later loses nothing that it said, and waits for what lasts alone."""

import subprocess
import sys

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


def test_the_end_waits_for_what_lasts_alone_and_says_so():
    assert ended(seconds=600, lasting=False, code=3) == (3, "said\n", "")
    code, out, words = ended(seconds=2, lasting=True, code=0)
    assert (code, out) == (0, "said\nmade\n") and words.count("\n") == 1 and "Ctrl-C" in words
    assert ended(seconds=0, lasting=True, code=3) == (3, "made\nsaid\n", "")
