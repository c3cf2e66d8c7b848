"""The manifest: what it says of a command that differs, and what it refuses to be read as one."""

import json
from pathlib import Path
from typing import Any

import batch_rows
import pytest

from et_jax.batch.manifest import VERSION, manifest_path
from et_jax.errors import UsageError

SETTINGS = batch_rows.SETTINGS | {"model": "bundled", "max_num_seqs": 8, "page_size": None, "chat": False}


def begin(path: Path, *names: str, **changes: Any) -> None:
    batch_rows.begin(path, *names, settings=SETTINGS | changes)


def refusal(path: Path, **changes: Any) -> str:
    before = path.read_bytes(), manifest_path(path).read_bytes()
    with pytest.raises(UsageError) as caught:
        begin(path, **changes)
    assert before == (path.read_bytes(), manifest_path(path).read_bytes())
    said = str(caught.value)
    assert said.endswith(".") and "\n" not in said and len(said) < 600
    return said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 4}, ["--max-num-seqs was 8 and is 4"]),
        ({"page_size": 16}, ["--page-size was not given and is 16"]),
        ({"system_prompt": "x" * 5000}, ["xxxx..."]),
        ({"system_prompt": "\x1b[2J"}, [r"\u001b[2J"]),
        (
            {"params": {"temperature": 0.5, "stop": [], "top_k": 0}},
            ["--temperature was 1.0 and is 0.5", '--stop was ["x"] and is []'],
        ),
    ],
)
def test_each_setting_is_named_as_its_flag(tmp_path, change, words):
    begin(tmp_path / "out", "a")
    said = refusal(tmp_path / "out", **change)
    assert all(word in said for word in words)
    assert "{" not in said and "--top-k" not in said and said.count(" was ") == len(words) + 2  # of which it was begun


def test_a_batch_goes_on_though_requests_have_more_settings_now(tmp_path):
    """What was not known when it was begun was off, unless the command sets it now."""
    begin(tmp_path / "out", "a")
    params = SETTINGS["params"]
    begin(tmp_path / "out", "b", params=params | {"top_h": 0.0, "bad_words": [], "p_less": False})
    assert "--top-h was not given and is 0.4" in refusal(tmp_path / "out", params=params | {"top_h": 0.4})


def manifest(**changes: Any) -> bytes:
    return json.dumps({"version": VERSION, **SETTINGS, **changes}).encode()


def test_what_is_no_manifest_is_left_alone(tmp_path):
    texts = b"", b"[]", b"{", b"caf\xe9", b"\0" * 200, manifest(version=[])
    large = b"[" * 1_000_000, b'{"version": ' + b"9" * 5000 + b"}", b'{"model_files": "' + b"a" * 20_000_000 + b'"}'
    for number, data in enumerate((*texts, *large)):
        for rows in ("", "a"):
            output = tmp_path / f"{number}{rows}"
            begin(output, *rows)
            manifest_path(output).write_bytes(data)
            assert ".manifest.json is no manifest of a job; choose another --output" in refusal(output)


def test_a_manifest_of_another_version_is_refused_where_there_are_rows(tmp_path):
    output, place = tmp_path / "out", manifest_path(tmp_path / "out")
    begin(output)
    place.write_text(json.dumps(SETTINGS))  # as it was before it had a version
    begin(output, "a")
    assert json.loads(place.read_bytes())["version"] == VERSION
    place.write_text(json.dumps(SETTINGS))
    said = refusal(output)
    assert "was begun by an earlier version of et_jax" in said and "finish it with that" in said
    place.write_bytes(manifest(version=VERSION + 1))
    assert "was begun by a later version of et_jax" in refusal(output)


def test_a_key_too_many_is_a_difference_and_another_spelling_of_the_model_is_none(tmp_path):
    begin(tmp_path / "out", "a")
    begin(tmp_path / "out", model="./there/it/is")
    manifest_path(tmp_path / "out").write_bytes(manifest(tolerance=0.5))
    assert "--tolerance was 0.5 and is not given" in refusal(tmp_path / "out")
