"""The benchmark of self-drafts: cases are written down as they come, and a run that was cut goes on."""

import json
import sys

import pytest
from scripts_here import script

from et_jax.evidence import draft_tables
from scripts.measuring.shapes import SMALL

pytestmark = pytest.mark.usefixtures("hardly_optimised")

CONTEXTS = ("64", "128")


def test_a_run_that_was_cut_keeps_its_cases_and_goes_on(tmp_path, monkeypatch):
    bench = script("bench_self")
    monkeypatch.setattr(bench, "SMOLLM_135M", SMALL)
    monkeypatch.setattr(bench, "TRUSTED", ("certified",))
    monkeypatch.setattr(bench, "MOST", 4)
    monkeypatch.setattr(bench, "FORCED", (0, 1, 4))
    output = tmp_path / "self.json"
    small = ["--part", "filled", "--sequences", "1", "--tokens", "6", "--fewest", "6", "--rounds", "1"]

    def run(*more: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["bench_self", *small, "--output", str(output), *more])
        bench.main()
        return json.loads(output.read_text())

    written = bench.write

    def cut(path, *args, **results):
        written(path, *args, **results)
        if len(results["cases"]) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        run("--contexts", *CONTEXTS, "--rates", "0.9", "0.45", "0")
    monkeypatch.setattr(bench, "write", written)
    before = json.loads(output.read_text())["cases"]
    assert [case["way"] for case in before] == ["0.9", "0.45", "0"] and before[0]["context"] == 64
    found = run("--resume", "--contexts", *CONTEXTS, "--rates", "0.9", "0.45", "0")
    assert found["cases"][:3] == before
    ways = {(case["context"], case["way"]) for case in found["cases"]}
    assert ways == {(int(context), way) for context in CONTEXTS for way in ("0.9", "0.45", "0", "certified")}
    assert len(found["cases"]) == 8 and all(case["ratio"] > 0 and case["tokens"] == 6 for case in found["cases"])
    assert "certified, trusted" in draft_tables.self_drafting(found["cases"])
    apart = run("--resume", "--part", "steps", "--contexts", *CONTEXTS)
    assert apart["cases"] == found["cases"] and [case["context"] for case in apart["steps"]] == [64, 128]
    assert all(seconds > 0 for case in apart["steps"] for seconds in case["seconds"].values())
    assert "4 drafted" in draft_tables.self_steps(apart["steps"])
    by_hand = [{"context": 64, "sequences": 1, "seconds": {"0": 0.1, "1": 0.1, "2": 0.2}}]
    assert "| 100 | 100 (1.90) | 200 (1.35) |" in draft_tables.self_steps(by_hand)  # 1 + 0.9 tokens, 1 + 0.9 + 0.81
    left = run("--contexts", *CONTEXTS, "--rates", "0", "--gigabytes", "1e-9")
    assert left["left_out"] == [[64, 1], [128, 1]] and not left["cases"]
