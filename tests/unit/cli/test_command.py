"""How a command ends: one sentence and a number, whatever it was given and wherever it writes, in any encoding."""

import json
from pathlib import Path

import pytest
from quick import shell

from et_jax import generate
from et_jax.cli import command
from et_jax.cli.streams import open_text


@pytest.mark.parametrize(
    ("line", "prompt", "words"),
    [
        ('"$@" <&-', "-", "Standard input is closed"),
        ("printf 'It \\xff was' | \"$@\"", "-", "Standard input is not UTF-8 (byte 0xff at 3)"),
        ('"$@"', b"It \xff was", "--prompt is not UTF-8"),
        ('"$@" >&-', "It was", "Standard output is closed"),
    ],
)
def test_streams_and_arguments_that_hold_no_text_are_refused(line, prompt, words):
    code, out, err = shell(line, "-p", prompt)
    assert (code, out) == (command.USAGE, b"")
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and words in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--max-tokens", "abc"), "--max-tokens is 'abc'; give a whole number."),
        (("--temp", "hot"), "--temperature is 'hot'; give a number."),
        (("--unknown",), "unrecognized arguments: --unknown; --help lists the flags."),
    ],
)
def test_flags_that_cannot_be_parsed_are_refused_in_one_sentence(capfd, flags, sentence):
    assert generate.main(["-p", "It was", *flags]) == command.USAGE
    assert capfd.readouterr() == ("", f"error: {sentence}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to write to")
def test_a_full_disk_is_named():
    code, _, err = shell('"$@" > /dev/full', "-p", "It was")
    assert code == command.FAILED and err.splitlines()[-1].startswith("error: standard output: No space left on device")
    code, out, err = shell('"$@"', "-p", "It was", "--max-tokens", "2", "--json", "--trace", "/dev/full")
    assert code == command.FAILED and err.splitlines()[-1].startswith("error: /dev/full: No space left on device")
    assert json.loads(out)["text"] == " était une"  # which comes after the trace, and is not lost with it
    code, out, _ = shell('"$@" 2> /dev/full', "-p", "It was", "--max-tokens", "2")
    assert (code, out.decode()) == (0, " était une\n")


def test_without_standard_error_the_text_comes_and_no_file_takes_its_number(tmp_path):
    code, out, err = shell('"$@" 2>&-', "-p", "It was", "--max-tokens", "2", "--trace", str(tmp_path / "t.jsonl"))
    assert (code, out.decode(), err) == (0, " était une\n", "")
    _, *rows, _ = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["text"] for row in rows] == [" était", " une"]


def test_a_terminal_without_the_letter_gets_its_escape(tmp_path):
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for environment in ({"PYTHONIOENCODING": "ascii"}, c_locale):
        code, out, err = shell('"$@"', "-p", "Il était", "--max-tokens", "2", **environment)
        assert (code, out) == (0, b" \\xe9tait une\n") and "Traceback" not in err
    code, out, _ = shell('"$@"', "-p", "Il était", "--max-tokens", "2", "--json", **c_locale)
    completion = json.loads(out)
    assert code == 0 and out.isascii()
    assert (completion["prompt"], completion["text"]) == ("Il était", " était une")
    with open_text(str(tmp_path / "trace")) as file:  # as JSON escapes half of a surrogate pair
        file.write(json.dumps("a\ud83d", ensure_ascii=False))
    assert json.loads((tmp_path / "trace").read_text(encoding="utf-8")) == "a\ud83d"


def test_a_reader_that_has_enough_hears_no_complaint():
    piped = 'set -o pipefail; "$@" | head -c 1'
    code, out, err = shell(piped, "-p", "It was", "--max-tokens", "9", wait="time.sleep(0.1)")
    assert (code, out, err) == (command.READER_GONE, b" ", "")
