"""A process that ends while something is made for later does not wait for it, and loses nothing that it said."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from et_jax.io import later

busy = later.worker()
busy.submit(time.sleep, {seconds})
busy.shutdown(wait=False)
print("said")
print("told", file=sys.stderr)
later.leave({code})
"""


@pytest.mark.parametrize(("seconds", "code"), [(600, 0), (600, 3), (0, 0), (0, 3)])
def test_the_end_waits_for_nothing_made_for_later(seconds, code):
    command = [sys.executable, "-c", SCRIPT.format(seconds=seconds, code=code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "said\n", "told\n")
