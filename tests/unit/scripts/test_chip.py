"""What is decided around the steps of a chip: which cases run, in which process, and how long they would take."""

import pytest

from et_jax.errors import UsageError
from scripts.chip import cases
from scripts.chip.cases import Case, Settings
from scripts.chip.modelled import modelled
from scripts.experiments import chip
from scripts.measuring.experiment import Missed

ROW = {"milliseconds": [1.0, 2.0, 3.0], "share_read": 0.5}


def names(found):
    return [case.name for case in found]


def test_every_size_and_control_is_a_case_of_its_own():
    plain, all_ = cases.cases_of(Settings(), False), cases.cases_of(Settings(), True)
    assert len(set(names(all_))) == len(all_) and set(names(plain)) < set(names(all_))
    assert len(plain) == 4 * 5 + 2 and len(all_) == len(plain) + 5
    assert names(cases.chosen(all_, ["8x32768 off", "torch smollm"])) == [
        "decode llama-3-8b 8x32768 off",
        "torch llama-3-8b 8x32768 off",
        "torch smollm-135m 1x2048 off",
    ]
    with pytest.raises(UsageError, match="9x9"):
        cases.chosen(all_, ["9x9"])


SOME = [Case(engine="decode", shape="small", rows=1, tokens=64, control=one) for one in ("off", "quest", "paper")]


class Processes:
    """Processes of which each finds what is written for it."""

    def __init__(self, *found):
        self.found, self.asked = list(found), []

    def __call__(self, settings, group):
        self.asked.append([case.control for case in group])
        yield from self.found.pop(0)


def test_a_case_that_fails_is_missed_and_those_after_it_run_in_another_process(monkeypatch):
    started = Processes([ROW, {"error": "out of memory"}], [ROW])
    monkeypatch.setattr(chip.processes, "measured", started)
    arms = chip.arms(Settings(), SOME)
    assert arms["off"]() == ROW
    with pytest.raises(Missed, match="out of memory"):
        arms["quest"]()
    assert arms["paper"]() == ROW and started.asked == [["off", "quest", "paper"], ["paper"]]


def test_a_case_that_is_left_out_gives_its_figures_to_no_other(monkeypatch):
    started = Processes([ROW, {}, {}], [ROW | {"share_read": 0.1}])
    monkeypatch.setattr(chip.processes, "measured", started)
    arms = chip.arms(Settings(), SOME)
    assert arms["off"]() == ROW and arms["paper"]()["share_read"] == 0.1
    assert started.asked == [["off", "quest", "paper"], ["paper"]]


def test_modelled_times_are_those_of_bytes_and_launches():
    [case] = cases.chosen(cases.cases_of(Settings(), False), ["decode llama-3-8b 8x32768 off"])
    found = modelled(case)
    assert found is not None
    weights, keys = 16.06e9, 8 * 32_768 * 8 * 2 * 128 * 2 * 32
    assert found["bytes"] == pytest.approx(weights + keys, rel=0.01)
    assert found["milliseconds"] == pytest.approx(found["bytes"] / 4.2e9 + found["launches"] * 2.5e-3, rel=0.01)
