"""No file of a command is another one, however it is spelled, and nothing is written before that is known."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from et_jax import evaluate, generate
from et_jax.cli import command
from et_jax.cli.paths import check_paths
from et_jax.errors import UsageError
from et_jax.report import __main__ as report
from et_jax.report import trace
from et_jax.serve import engine


def refusal(**paths: Path | None) -> str:
    """What is said of `--input` and `--haystack`, which are read, beside others, which are written."""
    read = {f"--{name}": path for name, path in paths.items() if name in ("input", "haystack")}
    written = {f"--{name}": path for name, path in paths.items() if name not in ("input", "haystack", "folder")}
    with pytest.raises(UsageError) as caught:
        check_paths(read, written, paths.get("folder"))
    return str(caught.value)


def test_one_file_under_two_names(tmp_path):
    file, soft, hard, down = (tmp_path / name for name in ("a", "soft", "hard", "down"))
    file.write_text("mine")
    soft.symlink_to(file)
    hard.hardlink_to(file)
    down.mkdir()
    for other in (file, soft, hard, down / ".." / "a", Path(os.path.relpath(file))):
        said = refusal(input=file, metrics=other)
        assert said.startswith(f"--metrics {other} is the same file as --input {file};")
        assert said.endswith("choose another file.")
        assert "--plot" in refusal(trace=file, plot=other)


def test_two_files_that_are_not_there_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "here").symlink_to(tmp_path)
    for other in (tmp_path / "link", tmp_path / "here" / "a", tmp_path / "x" / ".." / "a", tmp_path / "A"):
        assert "--plot" in refusal(trace=tmp_path / "a", plot=other)
    assert "--plot" in refusal(trace=tmp_path / "Stra\u00dfe", plot=tmp_path / "STRASSE")


def test_files_that_may_stand_beside_one_another(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    check_paths(
        {"--input": tmp_path / "a", "--haystack": tmp_path / "a"},  # two may read one file
        {"--output": tmp_path / "b", "--plot": tmp_path / "c", "--metrics": None, "--trace": Path("/dev/null")},
        tmp_path / "absent",
    )
    check_paths({"--input": Path("/dev/null")}, {"--trace": Path("/dev/null")}, None)


def test_a_model_is_not_written_over(tmp_path):
    model = tmp_path / "model"
    (model / "orbax" / "d").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "orbax" / "d" / "0").write_text("")
    (tmp_path / "hard").hardlink_to(model / "config.json")
    (tmp_path / "deep").hardlink_to(model / "orbax" / "d" / "0")
    (tmp_path / "link").symlink_to(model)
    outside = [tmp_path / "hard", tmp_path / "deep"]
    inside = [model / "config.json", model / "new.json", tmp_path / "link" / "new", model / "orbax" / "new"]
    for path in outside + inside:
        assert f"--trace {path} is a file of the model in {model}" in refusal(trace=path, folder=model)
    check_paths({"--input": model / "config.json"}, {"--output": tmp_path / "out"}, model)
    check_paths({}, {"--output": model / "results" / "out"}, model)


def test_a_stream_is_a_file_too(tmp_path):
    """What the shell opened counts, where it is a file and no pipe."""
    code = (
        "import sys; from pathlib import Path; from et_jax.cli.paths import check_paths\n"
        "try: check_paths({}, {'--trace': Path(sys.argv[1])}, None)\n"
        "except ValueError as error: sys.exit(f'{error}')"
    )
    for number, name in enumerate(("input", "output", "error")):
        file = tmp_path / name
        file.write_text("mine")
        with file.open("r" if number == 0 else "a") as stream:
            stdin, stdout, stderr = (stream if number == place else None for place in range(3))
            command = [sys.executable, "-c", code, str(file)]
            done = subprocess.run(command, stdin=stdin, stdout=stdout, stderr=stderr, check=False)
        assert done.returncode == 1
        assert number == 2 or file.read_text() == "mine"
    assert "is the same file as standard error" in (tmp_path / "error").read_text()


BATCH = ["--model", "model", "--input", "in.jsonl", "--output", "out.jsonl"]
PROMPT, TASK = ["--model", "model", "-p", "It was"], ["--model", "model", "--task"]


@pytest.mark.parametrize(
    ("module", "given", "arguments"),
    [
        (generate, BATCH, "--metrics in.jsonl"),
        (generate, BATCH, "--metrics out.jsonl.manifest.json"),
        (generate, BATCH, "--output model/out.jsonl"),
        (generate, PROMPT, "--trace model/config.json"),
        (evaluate, TASK, "passkey --haystack in.jsonl --json in.jsonl"),
        (evaluate, TASK, "passkey --json model/config.json"),
    ],
)
def test_a_command_writes_over_nothing(tmp_path, monkeypatch, capfd, module, given, arguments):
    (tmp_path / "model").mkdir()
    for name in ("in.jsonl", "out.jsonl", "out.jsonl.manifest.json"):
        (tmp_path / name).write_text(f'{{"prompt": "mine", "id": "{name}"}}\n')
    (tmp_path / "model" / "config.json").write_text("{}")
    files = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert module.main([*given, *arguments.split()]) == command.USAGE
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and said.endswith("; choose another file.")
    assert " is the same file as " in said or " is a file of the model in " in said
    assert contents(tmp_path) == files


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_every_file_to_write_is_looked_at_before_any_work(tmp_path, monkeypatch, capfd):
    """Nothing is loaded, nothing is written, and one sentence names the file or its flag (`io/test_files.py`)."""
    monkeypatch.setattr(engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(trace, "read_trace", lambda *_: pytest.fail("a trace was read"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "It was"}\n')
    (tmp_path / "file").write_text("mine")
    for suffix in ("", ".png", ".html", ".parquet"):
        (tmp_path / f"folder{suffix}").mkdir()
    prompt, batch = ["-p", "It was"], ["--input", "in.jsonl", "--output", "out.jsonl"]
    table = [
        (generate, prompt, "--trace", ""),
        (generate, prompt, "--plot", ".png"),
        (generate, prompt, "--report", ".html"),
        (generate, prompt, "--metrics", ""),
        (generate, batch, "--output", ""),
        (generate, batch, "--output", ".parquet"),
        (generate, prompt, "--save-prefix", ""),
        (generate, batch, "--metrics", ""),
        (generate, batch, "--report", ".html"),
        (evaluate, [], "--json", ""),
        (evaluate, ["--task", "loss", "--haystack", "file"], "--json", ""),
        (evaluate, [], "--plot", ".png"),
        (report, ["in.jsonl"], "--output", ".html"),
    ]
    before = sorted(tmp_path.iterdir())
    for module, given, flag, suffix in table:
        for name in ["", "new/", f"folder{suffix}", f"no/new{suffix}", "a\0b", f"a\0b{suffix}"]:
            assert module.main([*given, flag, name]) == command.USAGE, (flag, name)
            out, err = capfd.readouterr()
            [said] = err.splitlines()
            assert not out and said.startswith("error: ") and said.endswith("."), (flag, name, said)
            assert flag in said if name == "" else repr(name)[1:-1] in said or flag in said, (flag, name, said)
            assert sorted(tmp_path.iterdir()) == before, (flag, name)
