"""Whatever stands in a trace, in the output of a batch, or in a completion made by hand: a page, or one sentence."""

import copy
import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import numpy as np
import pytest
from samples import row as batch_row
from samples import sample, traced, write

from et_jax.errors import UsageError
from et_jax.report.batch import write_batch_report
from et_jax.report.page import write_report
from et_jax.report.plot import plot_trace
from et_jax.report.trace import read_trace
from et_jax.serve.completions import Completion, PromptRead, TokenTrace
from et_jax.serve.totals import Totals
from et_jax.types import replace

DEEP: Any = functools.reduce(lambda inner, _: [inner], range(200), [])
NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 3e38, 1e-320, 0, -1, 10**30, 10**400, True, 1.5]
TEXTS = ["", "\ud800", "\x00", "<script>", "</script>"]
NESTED = [[], {}, DEEP, [[]], {"\ud800": 1}, {"a": math.nan}, [[1, 1e308], [2, -1e308]], [[[1]]]]
VALUES = [*NUMBERS, *TEXTS, None, *NESTED]


@pytest.fixture(autouse=True)
def _cheap_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is compiled once, and the library that draws stays away."""
    kept: dict[str, jinja2.Template] = {}
    own = jinja2.Environment.get_template

    def once(self: jinja2.Environment, name: str) -> jinja2.Template:
        if name not in kept:
            kept[name] = own(self, name)
        return kept[name]

    monkeypatch.setattr(jinja2.Environment, "get_template", once)
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda snippet: "")


EACH = pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])  # every eleventh change, or all


def data_of(page: Path) -> dict[str, Any]:
    """The data of a page, which are JSON in the strict sense."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the page holds {name}")

    text = page.read_bytes().decode("utf-8")
    return json.loads(text.split('id="report">')[1].split("</script>")[0], parse_constant=refuse)


def outcome(work: Callable[[], object]) -> str:
    """What a reader gets: "page", or the sentence; warnings are neither."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work()
    except UsageError as refused:
        said = str(refused)
        assert "\n" not in said and said.isprintable() and said.endswith(".") and len(said) < 600
        return said
    return "page"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within plain values."""
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        yield (*path, name)
        yield from places(inner, (*path, name))


def mutated(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = at = copy.deepcopy(value)
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = new
    return value


def shortened(**given: Any) -> Completion:
    """Two tokens with all that there may be to tell, of two alternatives each."""
    done = sample(2, drafts=True, switched=True, **given)
    rows = [vars(row) | {"top": row.top[:1], "reads": row.reads[-1:]} for row in done.trace if row.reads is not None]
    read = PromptRead(blocks_read=1.0, blocks_held=2.0, mass_kept=0.5)
    return Completion(**vars(done) | {"trace": tuple(TokenTrace(**row) for row in rows), "prompt_read": read})


@EACH
def test_every_field_of_a_trace_may_hold_anything(tmp_path: Path, step: int) -> None:
    source, page = traced(tmp_path / "trace.jsonl", done=shortened()), tmp_path / "page.html"
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    del lines[1]  # the other token is like it
    changes = [(i, *one) for i, line in enumerate(lines) for one in itertools.product(places(line), VALUES)]
    got = []
    for number, path, value in changes[::step]:
        changed = [*lines[:number], mutated(lines[number], path, value), *lines[number + 1 :]]
        source.write_text("".join(json.dumps(one) + "\n" for one in changed))

        def work() -> None:
            about, done = read_trace(source)
            facts = {"model": about.model, "control": about.control}
            write_report(done, page, facts=facts, decode=lambda ids: f"</script>{ids[0]}")
            data_of(page)

        got.append(outcome(work))
    assert len(got) > 800 / step and got.count("page") > 60 / step


def reported(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The page on the rows of a batch, and its data."""
    source, page = write(folder / "out.jsonl", rows), folder / "page.html"
    write_batch_report(source, page, facts={})
    return page.read_text(), data_of(page)


@EACH
def test_every_field_of_a_batch_may_hold_anything(tmp_path: Path, step: int) -> None:
    rows = [batch_row(i, [sample(2 + i, seed=i)]) for i in range(3)]
    got = []
    for path, value in [*itertools.product(places(rows[1]), VALUES)][::step]:
        changed = [rows[0], mutated(rows[1], path, value), rows[2]]
        got.append(outcome(lambda changed=changed: reported(tmp_path, changed)))
    assert len(got) > 800 / step and got.count("page") > 60 / step


def by_hand(changes: dict[str, Any], own: dict[str, Any] | None = None) -> Completion:
    """A completion whose last token, and itself, have what no check of types has seen."""
    done = shortened()
    for name, value in changes.items():
        object.__setattr__(done.trace[-1], name, value)
    for name, value in (own or {}).items():
        object.__setattr__(done, name, value)
    return done


@EACH
def test_every_field_of_a_completion_may_hold_anything(tmp_path: Path, step: int) -> None:
    hostile = [*VALUES, b"x", object(), np.float32(0.5), np.int64(1), np.ones((1, 2), np.int64), np.array(math.nan)]
    given = [({name: value}, {}) for name in vars(shortened().trace[0]) for value in hostile]
    given += [({}, {name: value}) for name in vars(shortened()) for value in [*hostile, [None], (1,)]]
    pages = 0
    for changes, own in given[::step]:
        done = by_hand(changes, own)
        written = outcome(lambda done=done: write_report(done, tmp_path / "page.html"))
        if written == "page":
            data_of(tmp_path / "page.html")
            pages += 1
        drawn = outcome(lambda done=done: done._repr_html_().encode())
        assert drawn == written or "no token" in written
        assert outcome(lambda done=done: json.dumps(done.to_dict(), allow_nan=False).encode()) == drawn
    assert pages > 60 / step


FIGURES = ("entropy", "varentropy", "surprisal", "temperature", "entropic_time", "flops", "kept_mass")


def test_what_is_no_number_is_shown_as_missing(tmp_path: Path) -> None:
    for odd in (math.nan, math.inf, -math.inf):
        done = by_hand(dict.fromkeys(FIGURES, odd))
        write_report(done, tmp_path / "page.html")
        data, page = data_of(tmp_path / "page.html"), (tmp_path / "page.html").read_text()
        columns = data["tokens"]["text-1"]["columns"]
        for name in ("entropy (nats)", "varentropy (nats²)", "surprisal (nats)", "temperature", "attention mass kept"):
            assert columns[name][0] is not None and columns[name][1] is None, name
        assert data["figures"]["text-1-figure-1"]["columns"]["entropy"][1] is None
        assert "<dt>entropic time</dt><dd>unknown nats</dd>" in page and "unknown GFLOP" in page
        assert "entropy unknown nats\nsurprisal unknown nats\ntemperature unknown" in done._repr_html_()
        said = done.to_dict()
        assert said["entropic"]["entropic_time"] is None and said["logprobs"][1] is None
        assert said["entropic"]["mean_entropy"] == shortened().trace[0].entropy
    free = by_hand({"cost": 0.0})
    object.__setattr__(free.trace[0], "cost", 0.0)
    assert math.isnan(free.efficiency) and Totals.of([free]).to_dict()["nats_per_byte"] is None
    assert "unknown nats/MB" in Totals.of([free]).described()


def test_markup_is_shown_as_text_and_half_characters_as_marks(tmp_path: Path) -> None:
    write_report(sample(200), tmp_path / "page.html", facts={"model": "<b>"})
    page = (tmp_path / "page.html").read_text().partition('id="report">')[0]
    assert "<b>" not in page and "A &lt;b&gt;prompt" in page and "<dd>&lt;b&gt;</dd>" in page
    done = by_hand({"text": "a\ud800b"}, {"prompt": "\udfff", "error": "\ud800"})
    write_report(done, tmp_path / "page.html", facts={"\ud800": "\ud801"}, decode=lambda ids: "\ud800")
    for page in ((tmp_path / "page.html").read_text(), done._repr_html_()):
        assert "a\N{REPLACEMENT CHARACTER}b" in page


def test_any_text_is_in_a_picture_and_the_entropy_of_attention_where_it_is_known(tmp_path: Path) -> None:
    for texts, level in itertools.product(((), (" a\x00\x1bb\x0b", "\ud83d", "$x$ \\$ 中\r\n")), (0.5, None)):
        done = sample(len(texts))
        rows = [replace(row, text=text, attention_entropy=level) for row, text in zip(done.trace, texts, strict=True)]
        done = replace(done, trace=tuple(rows))
        for name in ("picture.svg", "picture.png")[: 1 + (level is None)]:
            assert outcome(lambda done=done, name=name: plot_trace(done, tmp_path / name)) == "page"
        ElementTree.parse(tmp_path / "picture.svg")
        drawn = "<!-- attention entropy -->" in (tmp_path / "picture.svg").read_text(encoding="utf-8")
        assert drawn == (level is not None and bool(texts))
