"""The command that times a GPU, in its quick size on a CPU: rows are written."""

import json

import pytest

from et_jax.models.bundled import bundled_folder
from scripts import bench_chip
from scripts.chip import cases
from scripts.measuring import tables


def test_each_case_is_a_row_with_its_rounds_and_where_it_comes_from(tmp_path):
    """Of two cases, the second of another process."""
    path, quick = tmp_path / "chip.json", ("--quick", "--model", str(bundled_folder("bundled-small")))
    assert bench_chip.main([*quick, "--output", str(path), "--profile", "--cases", "certified", "generate"]) == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    assert {"commit", "settings", "weights", "texts", "machine"} < content.keys()
    assert content["machine"]["device"] == "cpu" and content["settings"]["quick"] and content["weights"]["model"]
    certified, generated = content["rows"]
    assert certified["case"] == "decode small 1x512 certified" and generated["engine"] == "generate"
    for row in content["rows"]:
        assert len(row["rounds"]) == 3 and sorted(row["rounds"])[1] == row["milliseconds"] > 0
        assert 0 < row["share_read"] <= 1
    assert certified["kernels"] is None and certified["tolerance"] > 0


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
