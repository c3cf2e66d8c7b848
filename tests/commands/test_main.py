"""`python -m et_jax.report`: pages of what runs left, and what it says of files that are neither."""

import json

import pytest
from samples import row, sample, traced, write

from et_jax.report.__main__ import main
from et_jax.report.trace import VERSION


def test_a_trace_makes_the_page_of_its_run(tmp_path):
    assert main([str(traced(tmp_path / "trace.jsonl")), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    data = json.loads(page.split('id="report">')[1].split("</script>")[0])
    done = sample(20)
    told = data["tokens"]["text-1"]
    assert told["columns"]["entropy (nats)"] == [float(f"{one.entropy:.4g}") for one in done.trace]
    assert not any(word.startswith("#") for word in told["words"])  # spelled by the bundled tokenizer


def test_alternatives_of_a_model_that_is_not_here_have_their_ids(tmp_path, capfd):
    source = traced(tmp_path / "trace.jsonl", model="owner/model")
    assert main([str(source), "-o", str(tmp_path / "run.html")]) == 0
    assert "alternatives are told by their ids" in capfd.readouterr().err
    assert f"#{sample(20).trace[0].top[0][0]}" in (tmp_path / "run.html").read_text()


def test_the_output_of_a_batch_makes_the_page_of_the_batch(tmp_path):
    source = write(tmp_path / "out.jsonl", [row(i, [sample(4 + i, seed=i)]) for i in range(5)])
    assert main([str(source), "-o", str(tmp_path / "batch.html")]) == 0
    assert "5, 0 with an error" in (tmp_path / "batch.html").read_text()


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_what_it_refuses(tmp_path, capfd):
    page, source = str(tmp_path / "run.html"), traced(tmp_path / "trace.jsonl")
    lines = source.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join([json.dumps(json.loads(lines[0]) | {"trace": VERSION + 1}) + "\n", *lines[1:]]))
    assert f"version {VERSION + 1}; this et_jax reads version {VERSION}" in refused(capfd, str(other), "-o", page)
    other.write_text("".join(lines[1:]))
    assert "has no header" in refused(capfd, str(other), "-o", page)
    other.write_text(lines[0])
    assert "produced no token, so there is nothing to report" in refused(capfd, str(other), "-o", page)
    other.write_text("")
    assert "is empty" in refused(capfd, str(other), "-o", page)
    assert "is not there" in refused(capfd, str(tmp_path / "absent"), "-o", page)
    assert "cannot be written" in refused(capfd, str(source), "-o", str(tmp_path / "absent" / "run.html"))
    assert "is the same file as" in refused(capfd, str(source), "-o", str(source))
    assert not (tmp_path / "run.html").exists()
