"""Streams that are closed or of another encoding, and files that are looked at before they are written."""

import json

import pytest
from quick import shell

from et_jax.cli.streams import open_text


def test_without_standard_error_the_text_comes_and_no_file_takes_its_number(tmp_path):
    code, out, err = shell('"$@" 2>&-', "-p", "It was", "--max-tokens", "2", "--trace", str(tmp_path / "t.jsonl"))
    assert (code, out.decode(), err) == (0, " était une\n", "")
    _, *rows, _ = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["text"] for row in rows] == [" était", " une"]


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_without_the_letter_gets_its_escape(environment):
    code, out, err = shell('"$@"', "-p", "Il était", "--max-tokens", "2", **environment)
    assert (code, out) == (0, b" \\xe9tait une\n") and "Traceback" not in err
    code, out, _ = shell('"$@"', "-p", "Il était", "--max-tokens", "2", "--json", **environment)
    assert code == 0 and out.isascii()
    completion = json.loads(out)
    assert (completion["prompt"], completion["text"]) == ("Il était", " était une")


def test_a_lone_surrogate_is_escaped_as_json_does_it(tmp_path):
    with open_text(str(tmp_path / "trace")) as file:
        file.write(json.dumps("a\ud83d", ensure_ascii=False))
    assert json.loads((tmp_path / "trace").read_text(encoding="utf-8")) == "a\ud83d"
