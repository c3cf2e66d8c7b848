"""What may be an input: a file, or a pipe, of lines."""

import contextlib
import gzip
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from stand_in import PaperModel

from et_jax.batch.lines import read_lines
from et_jax.batch.source import check_lines, check_source, spooled
from et_jax.batch.tasks import read_entries
from et_jax.cli.command import USAGE
from et_jax.errors import UsageError
from et_jax.generate import main
from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams

ROWS = [{"id": f"r{i}", "prompt": f"It was {i}", "max_tokens": 3} for i in range(500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("in.jsonl", data)
    return buffer.getvalue()


OTHERS = [
    (gzip.compress(LINES.encode(), mtime=0), "is compressed with gzip; unpack it first"),
    (zipped(LINES.encode()), "is a zip archive"),
    (LINES.encode("utf-16-le"), "is UTF-16 or UTF-32"),
    (b"id,prompt\n1,It was\n2,It is\n", "seems to be a table (CSV)"),
    (json.dumps(ROWS).encode(), "is one JSON list"),
    ("".join(json.dumps(row, indent=2) + "\n" for row in ROWS).encode(), "has objects of more than one line"),
    (bytes(range(256)) * 4, "is no text"),
]


@pytest.mark.parametrize(("data", "words"), OTHERS)
def test_what_is_no_file_of_lines_is_refused_before_the_first_row(tmp_path, capfd, monkeypatch, data, words):
    monkeypatch.delattr(engine, "load")
    (tmp_path / "in.jsonl").write_bytes(data)
    assert main(["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == USAGE
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {tmp_path / 'in.jsonl'} {words}") and said.endswith(".")
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'\xef\xbb\xbf \n\n  {"prompt": "a"}',
        b'not a line\n{"prompt": "a"}\n',
        b"\0\0\n" + LINES.encode(),
        b"{\n" + LINES.encode(),  # a torn line, not an object of many
        b"x" * 100_000 + b"\n" + LINES.encode(),
        b'{"prompt": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_single_bad_lines_are_for_error_rows(tmp_path, data):
    (tmp_path / "in").write_bytes(data)
    check_lines(tmp_path / "in", "in")


@contextlib.contextmanager
def standard_input(stream: IO[Any] | str) -> Iterator[None]:
    """Have a file as standard input, or a pipe of a text that is no longer than a pipe has room for."""
    if isinstance(stream, str):
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(stream)
        stream = os.fdopen(reader)
    before = os.dup(0)
    with stream:
        os.dup2(stream.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)


def names_in(output: Path) -> set[str]:
    rows = [json.loads(line) for line in output.read_bytes().splitlines()]
    names = {row["custom_id"] for row in rows}
    assert len(names) == len(rows) and all(row["response"] for row in rows)
    return names


def test_a_pipe_is_an_input_and_goes_on_with_the_same_lines(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())
    output, everything = tmp_path / "out.jsonl", {row["id"] for row in ROWS}

    def serve(stream: IO[Any] | str) -> tuple[int, str]:
        with standard_input(stream):
            code = main(["-i", "/dev/stdin", "-o", str(output)])
        return code, capfd.readouterr().err

    code, said = serve("id,prompt\n1,It was\n")
    assert code == USAGE and said.splitlines()[-1].startswith("error: /dev/stdin seems to be a table (CSV)")
    assert not list(tmp_path.iterdir())
    assert serve("".join(LINES.splitlines(keepends=True)[:200]))[0] == 0
    assert names_in(output) == {row["id"] for row in ROWS[:200]}
    code, said = serve(LINES)
    assert code == 0 and "200 done before" in said and names_in(output) == everything
    with (tmp_path / "in.jsonl").open("w+") as file:
        file.write(LINES)
        file.seek(7)  # a redirected file is read from its start
        code, said = serve(file)
    assert code == 0 and "500 done before" in said
    before = output.read_bytes()
    code, said = serve(LINES.replace("It was 7", "It is 7") + '{"id": "new", "prompt": "a"}\n')
    assert code == USAGE and 'Line 8 (custom_id "r7") is not the line' in said and output.read_bytes() == before


def test_a_named_pipe_is_an_input_and_its_copy_goes(tmp_path, monkeypatch):
    pipe, copies = tmp_path / "pipe", tmp_path / "copies"
    os.mkfifo(pipe)
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    writer = threading.Thread(target=pipe.write_text, args=(LINES,))
    writer.start()
    with spooled(pipe) as lines:
        assert lines.read_text() == LINES and lines.parent == copies
        assert lines.stat().st_mode & 0o077 == 0
    writer.join()
    assert not list(copies.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=r"pipe cannot be copied to .*; point TMPDIR"), spooled(pipe):
        pass


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/tty"])
def test_what_ends_never_is_not_begun(tmp_path, capfd, source):
    assert main(["-i", source, "-o", str(tmp_path / "out.jsonl")]) == USAGE
    assert f"{source} is neither a file nor a pipe" in capfd.readouterr().err


def test_a_saved_data_set_is_answered_in_its_order_by_a_parquet_file(tmp_path, monkeypatch, capfd):
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    rows = {"question": ["It was", "x" * 200, "The sea"], "n": [2, 1, 1], "picture": [b"\xff"] * 3, "topic": ["a"] * 3}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "in", num_shards=2)
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())
    output = tmp_path / "out.parquet"
    command = ["-i", str(tmp_path / "in"), "-o", str(output), "--prompt-column", "question"]
    assert main(command) == 0
    found = parquet.read_table(output).to_pylist()
    first, second = PaperModel().continue_(GenerationRequest(prompt="It was", params=SamplingParams(n=2)))
    places = [("line-1", 0), ("line-1", 1), ("line-2", 0), ("line-3", 0)]
    assert [(row["custom_id"], row["index"]) for row in found] == places
    assert [row["text"] for row in found[:2]] == [first.text, second.text]
    assert (found[0]["prompt_tokens"], found[0]["completion_tokens"]) == (6, 2 * len(first.text))
    assert found[0]["entropic"]["entropic_time"] == first.entropic_time + second.entropic_time
    assert found[2]["text"] is None and "too long" in found[2]["error"] and found[3]["error"] is None
    output.unlink()
    monkeypatch.delattr(engine, "load")
    assert main(command) == 0 and parquet.read_table(output).to_pylist() == found
    assert main([*command[:-1], "topic"]) == USAGE
    assert "--prompt-column was question and is topic" in capfd.readouterr().err
    assert main([*command[:3], str(tmp_path / "other.jsonl"), "--prompt-column", "answer"]) == USAGE
    said = "has no column answer; name one of its own with --prompt-column: question, n, picture, topic."
    assert said in capfd.readouterr().err and not (tmp_path / "other.jsonl").exists()


def test_folders_without_one_data_set_are_refused(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"contains several data sets \(train, test\); name the folder of one"):
        check_source(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    for state, said in (
        ({"_data_files": [{"filename": "../x.arrow"}]}, r"names ../x\.arrow, which is not there"),
        ({"_data_files": [{"filename": "x.arrow"}]}, r"names x\.arrow, which is not there"),
        ({"_data_files": []}, "field _data_files is"),
    ):
        (tmp_path / "state.json").write_text(json.dumps(state))
        with pytest.raises(UsageError, match=said):
            check_source(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    (tmp_path / "x.arrow").write_bytes(b"no stream")
    pytest.importorskip("pyarrow")
    with pytest.raises(UsageError, match="is not a readable data set"):
        list(read_lines(tmp_path))


def test_a_field_of_lines_may_hold_the_prompt(tmp_path):
    turns = [{"role": "user", "content": "Hi"}]
    lines = [{"text": "It was", "seed": 3, "topic": "x", "prompt": "no"}, {"text": turns, "id": "b"}, {"prompt": "no"}]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two, three = read_entries(tmp_path / "in", "text")
    assert one.values == {"prompt": "It was", "seed": 3} and two.custom_id == "b"
    assert two.values == {"messages": turns, "id": "b"}
    assert three.problem == "text, which --prompt-column names, is missing; give the line one."
