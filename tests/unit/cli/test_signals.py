"""The signals that end a command: the first keeps the text, the second ends at once, none leaves a traceback."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from quick import generating, started

from et_jax.cli import signals as module_of_signals
from et_jax.cli.signals import Signals

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_the_first_signal_keeps_the_text():
    with started(*generating("-p", "It was", "--max-tokens", "99", wait="time.sleep(0.5)")) as process:
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 129
    assert out.endswith(b"\n") and b"(abort)" in err and b"Traceback" not in err


def test_the_second_signal_ends_whatever_is_waited_for():
    with started(*generating("-p", "It was", "--max-tokens", "99", wait="busy()")) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.decode().split()) == (143, ["interrupted"])


def test_a_signal_before_the_first_token_or_at_the_exit_waits_for_nothing():
    with started(*generating("-p", "It was", load="os.write(1, b'.'); busy()")) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.decode().strip()) == (130, "interrupted before the first token")
    rest = "threading.Thread(target=lambda: (time.sleep(1), os.write(1, b'!'), time.sleep(300))).start()"
    with started(*generating("-p", "It was", "--max-tokens", "1", load=rest)) as process:
        assert process.stdout is not None and process.stdout.read(len(" était\n!".encode()) - 1).endswith(b"!")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err.decode()


@pytest.mark.parametrize("module", ["generate", "evaluate"])
def test_an_interrupt_amid_imports_is_one_line(module, tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import os, time\nos.write(1, b'.')\ntime.sleep(300)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(module_of_signals.__file__).parents[2])])
    asked = ["-p", "It was"] if module == "generate" else []
    with started(sys.executable, "-m", f"et_jax.{module}", *asked, PYTHONPATH=path) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    [said] = err.decode().strip().splitlines()
    assert process.returncode == 130 and said.startswith("interrupted")


def test_what_was_ignored_stays_ignored():
    """As under nohup, or in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert signals.code == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
