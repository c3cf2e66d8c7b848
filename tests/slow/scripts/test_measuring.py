"""What experiments rest on: budgets that are met, intervals that hold what they should, constants that are recorded."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import ROOT
from small_model import MODEL, prompt, weights

from et_jax.control.budget import ConstantBudget
from et_jax.control.presets import preset
from et_jax.decode.plant import Plant
from et_jax.models.sensitivity import causal_attend
from et_jax.models.transformer import forward
from et_jax.serve.loading.min_context import MEASURED, NEVER
from scripts.measuring.experiment import Missed
from scripts.measuring.paired import at_budget, interval, matched, saving
from scripts.measuring.prompts import logits_of


@pytest.mark.parametrize("near", [None, 0.5, 0.97, 1.1, 1e-9, 1e9])
@pytest.mark.parametrize("wanted", [0.9, 0.5, 0.1])
def test_a_budget_is_met_to_a_thousandth(wanted, near):
    """Of a curve whose inverse is known, from nowhere or from a start so many times the answer."""
    asked = []

    def run(setting: float) -> tuple[float, str]:
        asked.append(setting)
        return 1.0 / (1.0 + setting**0.5), f"at {setting}"

    answer = (1 / wanted - 1) ** 2
    start = None if near is None else min(max(near * answer, 1e-7), 1e3)
    setting, result = matched(run, wanted, 1e-7, 1e3, start=start)
    assert setting == pytest.approx(answer, rel=0.03) and result == f"at {setting}"
    assert abs(1.0 / (1.0 + setting**0.5) - wanted) <= 1e-3 * wanted
    assert len(asked) < (6 if near in (0.97, 1.1) else 30)


def test_a_budget_that_no_setting_spends_is_told_with_the_nearest():
    with pytest.raises(Missed, match=r"no setting from 1e-07 to 1000 spends 0.5000; the nearest is 0.6000"):
        matched(lambda setting: (0.6 if setting < 1 else 0.2, None), 0.5, 1e-7, 1e3)
    setting, spent = matched(lambda one: (0.6 if one < 1 else 0.2,) * 2, 0.5, 1e-7, 1e3, or_nearest=True)
    assert setting < 1 and spent == 0.6


def test_an_interval_of_a_mean_is_as_wide_as_its_error():
    """Of 60 rows, 1.96 standard errors to either side; of equal rows, nothing."""
    rows = np.random.default_rng(0).normal(5.0, 2.0, size=60)
    low, high = interval(rows)
    half = 1.96 * rows.std() / 60**0.5
    assert (low, high) == pytest.approx((rows.mean() - half, rows.mean() + half), abs=0.05 * half)
    assert interval(np.full(7, 3.0)) == (3.0, 3.0)


def test_an_arm_at_a_budget_gives_what_it_gave_on_all_rows():
    """The search begins on few rows, of which the answer is another."""

    def run(setting: float, few: bool) -> SimpleNamespace:
        return SimpleNamespace(share=np.full(2 if few else 4, 1 / (1 + setting * (3 if few else 1))))

    setting, found = at_budget(run, "share", 0.25, 1e-6, 1e6, within=0.01)
    assert setting == pytest.approx(3.0, rel=0.02) and len(found.share) == 4


def test_a_saving_and_its_interval_are_of_sums():
    """Rows of which half lose all of little, and half nothing of much: no share of rows but of what is lost."""
    baseline = np.tile([1.0, 1000.0], 50)
    arm = np.tile([0.0, 1000.0], 50)
    found = saving(arm, baseline)
    assert found["low"] <= found["share"] <= found["high"] < 0.01
    assert found["share"] == pytest.approx(1 / 1001)


PAGE, SEGMENT, LENGTH = 4, 8, 48
PLANT = Plant(model=MODEL, page_size=PAGE, backend="xla", scores_backend="xla")
COMMON = {"segment": SEGMENT, "dense_layers": 0, "dense_until": 0}
TOKENS = jnp.asarray([prompt(1, LENGTH), prompt(2, LENGTH)], jnp.int32)


def read(budget):
    return logits_of(PLANT, weights(), budget, TOKENS, segment=SEGMENT)


def test_where_all_is_read_the_logits_are_those_of_the_plain_forward_pass():
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    wanted = jax.nn.log_softmax(forward(weights(), MODEL, TOKENS, positions, causal_attend, None)[0])
    got, num_read, num_held = read(ConstantBudget(tokens=LENGTH, **COMMON))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    before = sum(start // PAGE for start in range(0, LENGTH, SEGMENT))
    np.testing.assert_array_equal(num_read, num_held)
    np.testing.assert_array_equal(num_held, MODEL.num_layers * MODEL.num_kv_heads * before)


NO_SLOWER = 1.03  # of the time of `off`: what lies below is noise


def test_presets_choose_from_the_length_after_which_they_are_never_slower():
    random = json.loads((ROOT / "benchmarks/results/steps.json").read_text(encoding="utf-8"))
    names = ("presets.json", "presets_bursts.json", "presets_scan.json", "presets_batch.json", "presets_gemma.json")
    files = (ROOT / "benchmarks/results" / name for name in names)
    runs = [run for file in files for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    assert {random["machine"]["device"], *(run["machine"]["device"] for run in runs)} == {"cpu"}
    of_random = [(case["length"], way["control"], way["over_off"]) for case in random["cases"] for way in case["ways"]]
    of_real = [
        (group["labels"]["tokens"], name, arm["figures"]["milliseconds"]["ratio"]["value"])
        for run in runs
        for group in run["groups"]
        for name, arm in group["arms"].items()
        if name != "off"
    ]
    assert preset("share").preset.tolerance == 1 - 1 / 4
    for name, least in MEASURED["cpu"].items():
        ratios: dict[int, float] = {}  # of each length the slowest case
        own = {"share": "share 1/4"}.get(name, name)
        for length, control, ratio in (*of_random, *of_real):
            if control == own:
                ratios[length] = max(ratio, ratios.get(length, 0.0))
        slower = [length for length, ratio in ratios.items() if ratio > NO_SLOWER]
        # beyond the longest context of a real model nothing is known of one
        longest_real = max(length for length, control, _ in of_real if control == own)
        known = [length for length in ratios if length > max(slower, default=0) and length <= longest_real]
        assert least == min(known, default=NEVER)
