"""The edges of a command: streams that are closed, full or of another encoding, and the signals that end it."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from et_jax.batch.progress import Progress
from et_jax.cli import command
from et_jax.errors import UsageError
from et_jax.io.bar import Bar
from et_jax.io.terminal import takes_escapes
from et_jax.report.display import Status
from et_jax.report.plot import plot_trace
from et_jax.serve.completions import Completion, TokenTrace

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full to write to")

# Stands for the engine: a token in no time, or in half a second.
QUICK = """
import hashlib, os, runpy, sys, threading, time
from types import SimpleNamespace
from et_jax.serve import completions, engine
sys.argv[0] = "generate"

def busy():  # in a library, where no handler runs
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

class Model:
    metrics = SimpleNamespace(write=lambda path: None)
    def warm_up(self): pass
    def stream(self, prompts, params, cancelled):
        texts = [" \\xe9tait", " une", " fois"]
        trace = []
        for i in range(params.max_tokens):
            text = texts[i % 3]
            trace.append(completions.TokenTrace(
                token=i, text=text, entropy=1.0, varentropy=1.0, temperature=1.0, surprisal=1.0,
                blocks_read=1, blocks_held=1, kept_mass=1.0, entropic_time=1.0, cost=1.0, flops=1.0))
            if i: WAIT
            ends = i + 1 == params.max_tokens or cancelled()
            completion = completions.Completion(
                prompt=prompts[0], prompt_tokens=1, index=0, text="".join(row.text for row in trace),
                token_ids=tuple(range(i + 1)), finish_reason="abort" if cancelled() else "length", trace=tuple(trace),
                error=None,
            ) if ends else None
            yield completions.TokenEvent(prompt_index=0, index=0, text=text, trace=trace[-1], completion=completion)
            if ends: return

def load(*_, **__):
    LOAD
    return Model()

engine.load = load
runpy.run_module("et_jax.generate", run_name="__main__", alter_sys=True)
"""


def generating(*arguments: str | bytes, wait: str = "pass", load: str = "pass") -> list[str | bytes]:
    return [sys.executable, "-c", QUICK.replace("WAIT", wait).replace("LOAD", load), *arguments]


def shell(line: str, *arguments: str | bytes, wait: str = "pass", **environment: str) -> tuple[int, bytes, str]:
    """Run a command under redirections that only a shell can make: `line`, in which "$@" is the command."""
    ran = subprocess.run(
        ["bash", "-c", line, "bash", *generating(*arguments, wait=wait)],
        capture_output=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr.decode()


@pytest.mark.parametrize(
    ("line", "prompt", "words"),
    [
        ('"$@" <&-', "-", "Standard input is closed"),
        ("printf 'It \\xff was' | \"$@\"", "-", "Standard input is not UTF-8 (byte 0xff at 3)"),
        ('yes | "$@"', "-", "Standard input holds more than 16 MiB"),
        ('"$@"', b"It \xff was", "--prompt is not UTF-8"),
        ('"$@" >&-', "It was", "Standard output is closed"),
    ],
)
def test_streams_and_arguments_that_hold_no_text_are_refused(line: str, prompt: str | bytes, words: str) -> None:
    code, out, err = shell(line, "-p", prompt)
    assert (code, out) == (command.USAGE, b"")
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and words in err


def test_without_standard_error_the_text_comes_and_no_file_takes_its_number(tmp_path: Path) -> None:
    code, out, err = shell('"$@" 2>&-', "-p", "It was", "--max-tokens", "2", "--trace", str(tmp_path / "t.jsonl"))
    assert (code, out.decode(), err) == (0, " était une\n", "")
    rows = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["text"] for row in rows] == [" était", " une"]


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_without_the_letter_gets_its_escape(environment: dict[str, str]) -> None:
    code, out, err = shell('"$@"', "-p", "Il était", "--max-tokens", "2", **environment)
    assert (code, out) == (0, b" \\xe9tait une\n") and "Traceback" not in err
    code, out, _ = shell('"$@"', "-p", "Il était", "--max-tokens", "2", "--json", **environment)
    assert code == 0 and out.isascii()
    completion = json.loads(out)
    assert (completion["prompt"], completion["text"]) == ("Il était", " était une")


@needs_full
def test_a_full_disk_is_named() -> None:
    code, _, err = shell('"$@" > /dev/full', "-p", "It was")
    assert code == command.FAILED and err.splitlines()[-1].startswith("error: standard output: No space left on device")
    code, out, err = shell('"$@"', "-p", "It was", "--max-tokens", "2", "--json", "--trace", "/dev/full")
    assert code == command.FAILED and err.splitlines()[-1].startswith("error: /dev/full: No space left on device")
    assert json.loads(out)["text"] == " était une"  # which comes after the trace, and is not lost with it
    code, out, _ = shell('"$@" 2> /dev/full', "-p", "It was", "--max-tokens", "2")
    assert (code, out.decode()) == (0, " était une\n")


def test_a_reader_that_has_enough_hears_no_complaint() -> None:
    code, out, err = shell(
        'set -o pipefail; "$@" | head -c 1', "-p", "It was", "--max-tokens", "9", wait="time.sleep(0.1)"
    )
    assert (code, out, err) == (command.READER_GONE, b" ", "")


@contextlib.contextmanager
def started(*arguments: str | bytes, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that has said a first word on standard output; it does not outlive the test."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1) in (b" ", b".")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_keeps_the_text(number: int, code: int) -> None:
    with started(*generating("-p", "It was", "--max-tokens", "99", wait="time.sleep(0.5)")) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out.endswith(b"\n") and b"(abort)" in err and b"Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_whatever_is_waited_for(number: int) -> None:
    with started(*generating("-p", "It was", "--max-tokens", "99", wait="busy()")) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.decode().split()) == (128 + number, ["interrupted"])


def test_a_signal_before_the_first_token_ends_at_once() -> None:
    with started(*generating("-p", "It was", load="os.write(1, b'.'); busy()")) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.decode().strip()) == (130, "interrupted before the first token")


def test_a_signal_at_the_exit_waits_for_no_thread() -> None:
    rest = "threading.Thread(target=lambda: (time.sleep(1), os.write(1, b'!'), time.sleep(300))).start()"
    with started(*generating("-p", "It was", "--max-tokens", "1", load=rest)) as process:
        assert process.stdout is not None and process.stdout.read(len(" était\n!".encode()) - 1).endswith(b"!")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err.decode()


@pytest.mark.parametrize("module", ["generate", "evaluate"])
def test_an_interrupt_amid_imports_is_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import os, time\nos.write(1, b'.')\ntime.sleep(300)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(command.__file__).parents[2])])
    asked = ["-p", "It was"] if module == "generate" else []
    with started(sys.executable, "-m", f"et_jax.{module}", *asked, PYTHONPATH=path) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.decode().split()) == (130, ["interrupted"])


def test_what_was_ignored_stays_ignored() -> None:
    """As under nohup, or in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert signals.code == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
    ],
)
def test_escapes_go_to_terminals_that_take_them(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    here, there = pty.openpty()
    with open(there, "w") as terminal, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        status = Status()
        status.tell("loading")
        status.clear()
        with Bar(2), Progress(2, 0) as progress:
            progress.show(1, 1, 1)
        terminal.write("end")
    shown = b""
    while not shown.endswith(b"end"):
        shown += os.read(here, 4096)
    os.close(here)
    assert b"loading" in shown and (b"\x1b" in shown) == expected


def test_a_stream_that_is_no_terminal_gets_no_escapes() -> None:
    assert not takes_escapes(io.StringIO()) and not takes_escapes(None)


def completion(*texts: str) -> Completion:
    rows = [
        TokenTrace(
            token=i,
            text=text,
            entropy=1.0,
            varentropy=1.0,
            temperature=1.0,
            surprisal=1.0,
            blocks_read=1,
            blocks_held=1,
            kept_mass=1.0,
            entropic_time=1.0,
            cost=1.0,
            flops=1.0,
        )
        for i, text in enumerate(texts)
    ]
    return Completion(
        prompt="",
        prompt_tokens=1,
        index=0,
        text="".join(texts),
        token_ids=tuple(range(len(rows))),
        finish_reason="length",
        trace=tuple(rows),
        error=None,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("texts", [(), (" a\x00\x1bb\x0b", "\ud83d", "$x$ \\$ 中\r\n")])
def test_any_text_is_drawn_without_a_word(texts: tuple[str, ...], tmp_path: Path) -> None:
    plot_trace(completion(*texts), tmp_path / "picture.svg")
    ElementTree.parse(tmp_path / "picture.svg")
    plot_trace(completion(*texts), tmp_path / "picture.png")


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"a picture")
    command.check_writable(str(old))
    command.check_writable(str(new))
    assert old.read_bytes() == b"a picture" and not new.exists()
    for path in (tmp_path, tmp_path / "absent" / "new.png", Path(os.devnull)):
        with pytest.raises(UsageError, match="choose another file"):
            command.check_writable(str(path))


def test_a_lone_surrogate_is_escaped_as_json_does_it(tmp_path: Path) -> None:
    with command.open_text(str(tmp_path / "trace")) as file:
        file.write(json.dumps("a\ud83d", ensure_ascii=False))
    assert json.loads((tmp_path / "trace").read_text(encoding="utf-8")) == "a\ud83d"
