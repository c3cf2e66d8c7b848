"""The runner of experiments on arms whose figures are known: pairing, resuming, provenance, refusals, tables."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from et_jax.errors import UsageError
from scripts import measure
from scripts.measuring import experiment, runner, tables
from scripts.measuring.experiment import Base, Experiment, Figure, Group, Missed, setting

LOSSES = {"dense": [1.0, 2.0, 4.0, 1.0], "less": [2.0, 3.0, 4.0, 3.0], "half": [0.5, 1.0, 2.0, 0.5]}


class Settings(Base):
    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(4, "rows", least=2, most=100, quick=3)
    shares: tuple[float, ...] = setting((0.5,), "shares", least=0.0)
    way: str = setting("greedy", "way", choices=("greedy", "sampled"))


@pytest.fixture
def calls():
    return Counter()


@pytest.fixture
def plain(calls):
    """An experiment whose arms have known losses, and which counts their calls."""

    def groups(settings):
        calls["groups"] += 1

        def arm(name):
            calls[name] += 1
            if name == "never":
                raise Missed("no setting spends it")
            return {"loss": LOSSES[name][: settings.rows], "time": LOSSES[name][: settings.rows], "size": 7.0}

        for share in settings.shares:
            arms = {name: lambda name=name: arm(name) for name in ("dense", "less", "half", "never")}
            yield Group(labels={"share": share}, arms=arms, baseline="dense")

    figures = {"loss": Figure(header="loss", against="difference"), "size": Figure(header="size")}
    figures["time"] = Figure(header="time", against="saving")
    return Experiment(question="What do arms lose?", settings=Settings, groups=groups, figures=figures)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was a dark night.")
    return path


def run(plain, path, text, **given):
    return runner.run("plain", plain, Settings(text=text, **given), path, lambda line: None)


def test_arms_are_compared_row_by_row(plain, text):
    """Differences 1, 1, 0, 2 have the mean 1; their interval is narrower than rows drawn apart would give."""
    arms = run(plain, None, text)["groups"][0]["arms"]
    assert arms["dense"]["figures"]["loss"]["value"] == 2.0
    assert "difference" not in arms["dense"]["figures"]["loss"]
    difference = arms["less"]["figures"]["loss"]["difference"]
    assert difference["value"] == 1.0 and 0.0 <= difference["low"] < 1.0 < difference["high"] <= 2.0
    halved = arms["half"]["figures"]["time"]["saving"]  # of every row exactly half
    assert halved["share"] == halved["low"] == halved["high"] == 0.5
    assert arms["less"]["figures"]["size"] == {"value": 7.0}
    assert arms["never"]["missed"] == "no setting spends it"


def test_an_arm_in_the_file_is_not_measured_again(plain, text, tmp_path, calls):
    path = tmp_path / "found/plain.json"
    first = run(plain, path, text)
    content = json.loads(path.read_text())
    del content["runs"][0]["groups"][0]["arms"]["less"]
    path.write_text(json.dumps(content))
    again = run(plain, path, text)
    assert (calls["dense"], calls["less"], calls["never"]) == (1, 2, 1)
    for found in (first, again):
        for arm in found["groups"][0]["arms"].values():
            arm.pop("seconds")
    assert again["groups"][0]["arms"] == first["groups"][0]["arms"]


def test_an_arm_that_is_timed_by_itself_is_tried_again_after_it_failed(plain, text, tmp_path, calls):
    """Its rows are rounds: their median is shown."""

    def groups(settings):
        for group in plain.groups(settings):
            yield dataclasses.replace(group, timed=True)

    timed = dataclasses.replace(plain, groups=groups)
    for _ in range(2):
        arms = run(timed, tmp_path / "timed.json", text)["groups"][0]["arms"]
    assert (calls["dense"], calls["never"]) == (1, 2)
    assert arms["dense"]["figures"]["loss"] == {"value": 1.5, "low": 1.0, "high": 4.0}


def test_the_file_has_every_arm_that_was_measured_before_an_error(plain, text, tmp_path, monkeypatch):
    path = tmp_path / "plain.json"
    monkeypatch.delitem(LOSSES, "half")
    with pytest.raises(KeyError):
        run(plain, path, text)
    [found] = runner.runs_of(path)
    assert list(found["groups"][0]["arms"]) == ["dense", "less"]


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({"commit": "another"}, 2),
        ({"fingerprint": "another"}, 2),
        ({"machine": {"device": "another"}}, 2),
        ({"machine": {"load_average": 99.0}}, 1),
    ],
)
def test_a_run_of_another_provenance_is_measured_anew_and_replaces_the_old_one(
    plain, text, tmp_path, calls, monkeypatch, changed, measured
):
    path = tmp_path / "plain.json"
    run(plain, path, text)
    for name, one in changed.items():
        found = runner.machine() | one if name == "machine" else one
        monkeypatch.setattr(runner, name, lambda *_, found=found: found)
    run(plain, path, text)
    assert calls["dense"] == measured and len(runner.runs_of(path)) == 1


def test_arms_that_are_timed_take_turns_and_are_compared_round_by_round(text):
    order, clock = [], iter(np.arange(1.0, 100.0))

    def groups(settings):
        def start(name):
            def once():
                order.append(name)
                return {"seconds": next(clock)}

            return once

        yield Group(arms={name: lambda name=name: start(name) for name in ("off", "on")}, baseline="off", rounds=3)

    figures = {"seconds": Figure(header="s", against="ratio")}
    timed = Experiment(question="?", settings=Settings, groups=groups, figures=figures)
    arms = runner.run("timed", timed, Settings(text=text), None, lambda line: None)["groups"][0]["arms"]
    assert order == ["off", "on", "on", "off", "off", "on", "on", "off"]
    assert arms["off"]["rows"]["seconds"] == [4.0, 5.0, 8.0] and arms["on"]["rows"]["seconds"] == [3.0, 6.0, 7.0]
    assert arms["on"]["figures"]["seconds"]["value"] == 6.0
    ratio = arms["on"]["figures"]["seconds"]["ratio"]  # 3/4, 6/5, 7/8
    assert ratio == {"value": 7 / 8, "low": 3 / 4, "high": 6 / 5}


def test_a_file_of_other_results_is_refused_and_stays(plain, text, tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"cases": []}')
    with pytest.raises(UsageError, match="holds no runs"):
        run(plain, path, text)
    assert path.read_text() == '{"cases": []}'


def test_the_tables_of_the_documents_are_those_of_the_results():
    """As `python -m scripts.measure --tables` writes them."""
    for name in experiment.names():
        found, path = experiment.load_experiment(name), measure.RESULTS / f"{name}.json"
        document = tables.DOCUMENT.read_text(encoding="utf-8")
        assert document.count(f"<!-- {name}: begin -->\n") == document.count(f"<!-- {name}: end -->") == 1, name
        if path.exists():
            part = tables.illustrated(name, found, runs := runner.runs_of(path))
            assert all((tables.DOCS / place).exists() for one in runs if (place := tables.picture(name, found, one)))
            assert f"<!-- {name}: begin -->\n\n{part}\n\n<!-- {name}: end -->" in document, name
