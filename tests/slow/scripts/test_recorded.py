"""Constants of the package are those that benchmarks/results records."""

import json

from places import ROOT

from et_jax.serve.loading.min_context import MEASURED, NEVER

NO_SLOWER = 1.03  # of the time of `off`: what lies below is noise


def test_presets_choose_from_the_length_after_which_they_are_never_slower():
    random = json.loads((ROOT / "benchmarks/results/steps.json").read_text(encoding="utf-8"))
    real = json.loads((ROOT / "benchmarks/results/experiments/presets.json").read_text(encoding="utf-8"))["runs"]
    assert {random["machine"]["device"], *(run["machine"]["device"] for run in real)} == {"cpu"}
    measured = [
        *((case["length"], way["control"], way["over_off"]) for case in random["cases"] for way in case["ways"]),
        *(
            (group["labels"]["tokens"], name, arm["figures"]["milliseconds"]["ratio"]["value"])
            for run in real
            for group in run["groups"]
            for name, arm in group["arms"].items()
            if name != "off"
        ),
    ]
    for name, least in MEASURED["cpu"].items():
        ratios: dict[int, float] = {}  # of each length the slowest case
        for length, control, ratio in measured:
            if control == name:
                ratios[length] = max(ratio, ratios.get(length, 0.0))
        slower = [length for length, ratio in ratios.items() if ratio > NO_SLOWER]
        # beyond the longest context of a real model nothing is known of one
        longest_real = max(group["labels"]["tokens"] for run in real for group in run["groups"])
        known = [length for length in ratios if length > max(slower, default=0) and length <= longest_real]
        assert least == min(known, default=NEVER)
