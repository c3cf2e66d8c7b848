"""Constants of the package are those that benchmarks/results records."""

import json

from places import ROOT

from et_jax.serve.min_context import MEASURED, NEVER

NO_SLOWER = 1.03  # of the time of `off`: what lies below is noise


def test_presets_choose_from_the_length_after_which_they_are_never_slower():
    recorded = json.loads((ROOT / "benchmarks/results/steps.json").read_text(encoding="utf-8"))
    assert recorded["machine"]["device"] == "cpu"
    for name, least in MEASURED["cpu"].items():
        ratios: dict[int, float] = {}  # of each length the slowest case
        for case in recorded["cases"]:
            for way in case["ways"]:
                if way["control"] == name:
                    ratios[case["length"]] = max(way["over_off"], ratios.get(case["length"], 0.0))
        slower = [length for length, ratio in ratios.items() if ratio > NO_SLOWER]
        assert least == min((length for length in ratios if length > max(slower, default=0)), default=NEVER)
