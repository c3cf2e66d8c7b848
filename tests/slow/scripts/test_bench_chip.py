"""The command that times a GPU, in its quick size on a CPU: rows are written, and a second run adds what is lacking."""

import json
import time

import pytest

from et_jax.models.bundled import bundled_folder
from scripts import bench_chip
from scripts.chip import cases, processes
from scripts.measuring import tables

QUICK = ("--quick", "--model", str(bundled_folder("bundled-small")))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of two cases, the second of another process."""
    path = tmp_path_factory.mktemp("bench") / "chip.json"
    words = [*QUICK, "--output", str(path), "--profile", "--cases", "certified", "generate"]
    assert bench_chip.main(words) == 0
    return path


def test_each_case_is_a_row_with_its_rounds_and_where_it_comes_from(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert {"commit", "settings", "weights", "texts", "machine"} < content.keys()
    assert content["machine"]["device"] == "cpu" and content["settings"]["quick"] and content["weights"]["model"]
    certified, generated = content["rows"]
    assert certified["case"] == "decode small 1x512 certified" and generated["engine"] == "generate"
    for row in content["rows"]:
        assert len(row["rounds"]) == 3 and sorted(row["rounds"])[1] == row["milliseconds"] > 0
        assert 0 < row["share_read"] <= 1
    assert certified["kernels"] is None and certified["tolerance"] > 0


def test_a_run_that_is_resumed_measures_what_is_lacking_and_keeps_the_rest(path, monkeypatch, capsys):
    before = json.loads(path.read_text(encoding="utf-8"))
    started = []

    def worker(settings, group, until):
        started.append([case.name for case in group])
        yield {"provenance": {name: one for name, one in before.items() if name not in ("script", "rows")}}
        yield {"found": {"milliseconds": 2.0, "rounds": [1.0, 2.0, 3.0], "share_read": 1.0}}
        yield {"code": 0}

    monkeypatch.setattr(processes.run, "__defaults__", (worker,))
    words = [*QUICK, "--output", str(path), "--profile", "--resume"]
    assert bench_chip.main([*words, "--cases", "certified", "generate"]) == 0 and not started
    assert bench_chip.main([*words, "--cases", "decode"]) == 0
    assert started == [["decode small 1x512 off"]]
    assert capsys.readouterr().out.splitlines()[-1].startswith("decode small 1x512 off: 2.000 ms a step")
    after = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert after[:2] == before["rows"] and after[2]["milliseconds"] == 2.0
    path.write_text(json.dumps(before), encoding="utf-8")


def test_a_case_that_fails_says_so_and_the_time_is_kept(path, tmp_path, capsys):
    """Of a worker that is real: a text too short for its prompts; and one that is ended before it has begun."""
    short = tmp_path / "short.txt"
    short.write_text("Once.", encoding="utf-8")
    output = tmp_path / "chip.json"
    words = [*QUICK, "--output", str(output), "--cases", "generate", "--text", str(short)]
    assert bench_chip.main(words) == 1
    [row] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert "--text has" in row["error"] and "FAILED" in capsys.readouterr().out
    began = time.monotonic()
    assert bench_chip.main([*words, "--seconds", "1"]) == 1
    assert time.monotonic() - began < 60 and "no time was left" in capsys.readouterr().err


def test_the_document_has_the_markers():
    text = bench_chip.report.DOCUMENT.read_text(encoding="utf-8")
    assert bench_chip.report.DOCUMENT.parent == tables.DOCS
    assert text.count("<!-- bench_chip: begin -->\n") == text.count("<!-- bench_chip: end -->") == 1


def test_modelled_times_are_those_of_bytes_and_launches(capsys):
    assert bench_chip.main(["--modelled", "--cases", "decode llama-3-8b 8x32k off"]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    shape = cases.LLAMA, "8 x 32k", "off", "1"
    weights, keys = 16.06e9, 8 * 32_768 * 8 * 2 * 128 * 2 * 32
    assert tuple(cells[:4]) == shape and float(cells[4]) == pytest.approx((weights + keys) / 1e9, rel=0.01)
    milliseconds = float(cells[4]) / 4.2 + int(cells[6]) * 2.5e-3
    assert float(cells[7]) == pytest.approx(milliseconds, rel=0.01)
