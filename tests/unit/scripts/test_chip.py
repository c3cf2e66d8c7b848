"""What is decided around the steps of a chip: which cases run, in which process, at which tolerance, what is kept."""

import json

import pytest

from et_jax.errors import UsageError
from scripts.chip import cases
from scripts.chip.cases import Case, Settings
from scripts.chip.decoding import LEAST, MOST, TRIES, tolerance_for
from scripts.chip.processes import OutOfTime, run
from scripts.chip.record import Record

ROW = {"milliseconds": 2.0, "rounds": [1.0, 2.0, 3.0], "share_read": 0.5}
PLACE = {"device": "NVIDIA H200", "jax": "0.11.2"}
ORIGIN = {"commit": "a", "settings": {"steps": 16, "rounds": 3, "quick": False}, "weights": {}, "texts": {}}
ORIGIN |= {"machine": PLACE}


def names(found):
    return [case.name for case in found]


def test_every_size_and_control_is_a_case_of_its_own():
    plain, all_ = cases.cases_of(Settings(), False), cases.cases_of(Settings(model="smollm2"), True)
    assert len(set(names(all_))) == len(all_) and set(names(plain)) < set(names(all_))
    assert len(plain) == 4 * 5 + 2 and len(all_) == len(plain) + 5 + 6
    assert names(cases.chosen(all_, ["8x32k off", "torch smollm"])) == [
        "decode llama-3-8b 8x32k off",
        "torch llama-3-8b 8x32k off",
        "torch smollm-135m 1x2k off",
    ]
    with pytest.raises(UsageError, match="9x9"):
        cases.chosen(all_, ["9x9"])


@pytest.mark.parametrize("start", [1e-3, 0.1, 30.0])
@pytest.mark.parametrize("scale", [0.003, 0.2, 4.0])
def test_a_tolerance_is_found_by_which_the_share_is_read(start, scale):
    """Of a share that falls as the tolerance rises."""
    tried = []

    def share_at(tolerance):
        tried.append(tolerance)
        return 1 / (1 + tolerance / scale)

    found = tolerance_for(share_at, start)
    assert len(tried) <= TRIES and found in tried
    if len(tried) < TRIES:
        assert LEAST <= share_at(found) <= MOST


SOME = [Case(engine="decode", shape="small", rows=1, tokens=64, control=one) for one in ("off", "quest", "paper")]


class Workers:
    """Workers of which each says what is written for it."""

    def __init__(self, *scripts):
        self.scripts, self.asked = list(scripts), []

    def __call__(self, settings, group, until):
        self.asked.append([case.control for case in group])
        yield {"provenance": ORIGIN}
        for said in self.scripts.pop(0):
            if said is OutOfTime:
                raise OutOfTime
            yield said


def ran(tmp_path, workers, resume=False, seconds=60):
    said, path = [], tmp_path / "chip.json"
    left = run(Settings(), SOME, Record(path, resume), seconds, said.append, workers)
    content = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return left, content["rows"], said


def test_a_case_that_fails_is_a_row_and_the_rest_run_in_another_process(tmp_path):
    failed = {"found": {"error": "out of memory"}}
    workers = Workers([failed, {"code": 1}], [{"found": ROW}, {"code": -11}], [])
    left, rows, said = ran(tmp_path, workers)
    assert left == [] and workers.asked[:2] == [["off", "quest", "paper"], ["quest", "paper"]]
    assert [row.get("error") for row in rows] == ["out of memory", None, "its process ended with -11"]
    assert said[0] == f"{SOME[0].name}: FAILED out of memory"


def test_what_time_runs_out_for_is_no_row_and_is_measured_when_the_run_is_resumed(tmp_path):
    left, rows, _ = ran(tmp_path, Workers([{"found": ROW}, OutOfTime]))
    assert left == SOME[1:] and names(SOME[:1]) == [row["case"] for row in rows]
    again = Workers([{"found": ROW}, {"found": ROW}, {"code": 0}])
    left, rows, _ = ran(tmp_path, again, resume=True)
    assert left == [] and again.asked == [["quest", "paper"]] and names(SOME) == [row["case"] for row in rows]
    nothing = Workers()
    assert ran(tmp_path, nothing, resume=True)[0] == [] and nothing.asked == []
    assert ran(tmp_path, Workers(), seconds=0)[0] == SOME


def test_a_run_is_resumed_only_where_its_figures_come_from(tmp_path):
    path = tmp_path / "chip.json"
    first = Record(path, False)
    first.begin(ORIGIN)
    first.add(SOME[0], ROW)
    Record(path, True).begin(ORIGIN | {"machine": PLACE | {"load_average": 9.0}})
    with pytest.raises(UsageError, match=r"device NVIDIA H200, not H100"):
        Record(path, True).begin(ORIGIN | {"machine": PLACE | {"device": "H100"}})
    with pytest.raises(UsageError, match="commit a, not b"):
        Record(path, True).begin(ORIGIN | {"commit": "b"})
    assert Record(path, False).rows == {}
    path.write_text("[]")
    with pytest.raises(UsageError, match="no run of bench_chip"):
        Record(path, True)
