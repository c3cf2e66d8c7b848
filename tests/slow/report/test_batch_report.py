"""The report of a batch: the spread of its requests, and the way to those at both ends."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Look, browsing
from samples import row, sample, write

from et_jax.errors import UsageError
from et_jax.report.batch import EACH, MEASURES, Extremes, write_batch_report
from et_jax.report.rows import read_rows

FIGURES = ("mean_entropy", "nats_per_byte", "share_read")
ERROR = {"id": "batch_req_bad", "custom_id": None, "response": None, "error": {"code": "failed", "line": 3}}


def batch(count: int = 30) -> tuple[list[dict[str, Any]], Extremes]:
    """Rows of requests of 5, 6, 7 ... tokens, and what was kept of them."""
    extremes, rows = Extremes(), []
    for number in range(count):
        served = [sample(5 + number, seed=number)]
        rows.append(row(number, served))
        extremes.take(rows[-1], served)
    return rows, extremes


def test_the_extremes_that_are_kept_are_those_of_every_measure() -> None:
    rows, extremes = batch()
    bodies = {one["id"]: one["response"]["body"] for one in rows}
    wanted = set()
    for name in (*FIGURES, "completion_tokens"):
        order = sorted(bodies, key=lambda one, name=name: (bodies[one]["entropic"] | bodies[one]["usage"])[name])
        wanted |= {*order[:EACH], *order[-EACH:]}
    assert {name for name in bodies if extremes.of(name)} == wanted
    assert len(wanted) < len(rows)


def test_the_page_shows_the_spread_and_links_to_the_extremes(tmp_path: Path) -> None:
    rows, extremes = batch()
    source, place = write(tmp_path / "out.jsonl", [*rows, ERROR]), tmp_path / "batch.html"
    write_batch_report(source, place, facts={"model": "bundled"}, extremes=extremes)
    page = place.read_text()
    tokens = sum(one["response"]["body"]["usage"]["completion_tokens"] for one in rows)
    assert "<dd>31, 1 with an error</dd>" in page and f"<dd>{tokens:,}</dd>" in page
    links = re.findall(r'<a href="#(request-\d+)">Row', page)
    assert links == [f"request-{number}" for number, one in enumerate(rows, 1) if extremes.of(one["id"])]
    for link in links:
        section = page.partition(f'<section id="{link}"')[2].partition("</section>")[0]
        assert section.count('<div class="text"') == 1
    assert "most tokens: 34 tokens" in page
    told = [one["response"]["body"]["entropic"] for one in rows]
    entropy, efficiency, read = (max(one[name] for one in told) for name in FIGURES)
    assert f"most mean entropy: {entropy:.4g} nats a token" in page
    assert f"most efficiency: {1e6 * efficiency:.4g} nats a MB" in page
    assert f"most blocks read: {read:.4g} share of blocks" in page
    with browsing() as browser:
        look = Look(browser, place)
        look.scroll()
        assert (look.said, look.asked, look.faults()) == ([], [], [])


def page_of(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    write_batch_report(write(tmp_path / "out.jsonl", rows), tmp_path / "batch.html", facts={})
    return (tmp_path / "batch.html").read_text()


def test_every_request_is_counted_once_in_each_histogram_and_shows_its_text(tmp_path: Path) -> None:
    rows, _ = batch(100)
    page = page_of(tmp_path, rows)
    data = json.loads(page.split('id="report">')[1].split("</script>")[0])
    counted = [sum(figure["columns"]["requests"]) for figure in data["figures"].values() if "to" in figure["columns"]]
    assert counted == [100] * len(MEASURES)
    assert "not measured in this run" in page and 'class="text"' not in page


def test_rows_of_older_versions_and_of_errors_alone_are_reported(tmp_path: Path) -> None:
    rows, _ = batch(5)
    for one in rows:
        del one["response"]["body"]["entropic"]["mean_entropy"]
    page = page_of(tmp_path, rows)
    assert "Mean entropy of requests" not in page and "Efficiency of requests" in page
    assert "1, 1 with an error" in page_of(tmp_path, [ERROR])


def test_what_is_no_output_of_a_batch_is_refused(tmp_path: Path) -> None:
    rows, _ = batch(2)
    source = write(tmp_path / "out.jsonl", [rows[0], {"prompt": "an input"}])
    with pytest.raises(UsageError, match=r"line 2 is no row of a batch \(.*\); name the --output of a batch"):
        list(read_rows(source))
    source = write(tmp_path / "out.jsonl", rows)
    source.write_bytes(source.read_bytes()[:-20])
    assert len(list(read_rows(source))) == 1  # a torn last line is passed over
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        list(read_rows(tmp_path / "absent.jsonl"))
