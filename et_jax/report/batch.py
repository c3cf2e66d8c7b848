"""The report of a batch: the distribution of its requests, and the extreme ones, from the rows of its output.

Rows have the figures of each request; `Extremes` keeps the tokens of the extreme ones during the batch.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from et_jax.errors import UsageError
from et_jax.io.known import formatted
from et_jax.report.drawing import BLUE, GREEN, PURPLE, WARM, Figure, axis, chart, plain
from et_jax.report.figures import of_completion
from et_jax.report.page import Decode, Section, TextTable, facts_of, write_page
from et_jax.report.rows import Body, Row, read_rows
from et_jax.serve.completions import Completion

EACH = 3  # requests per extreme of a measure
MOST_POINTS = 2000  # requests shown in the scatter plot
_BINS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a request, from its row; `colour` is that of its histogram."""

    name: str
    unit: str
    colour: str
    of: Callable[[Body], float | None]


def _efficiency(body: Body) -> float | None:
    """Return nats a MB; None if nothing was moved, as for an answer without a token."""
    per_byte = body.entropic.nats_per_byte
    return 1e6 * per_byte if body.entropic.cost_bytes and per_byte is not None else None


MEASURES = (
    Measure(name="mean entropy", unit="nats a token", colour=WARM, of=lambda body: body.entropic.mean_entropy),
    Measure(name="efficiency", unit="nats a MB", colour=PURPLE, of=_efficiency),
    Measure(name="tokens", unit="tokens", colour=BLUE, of=lambda body: body.usage.completion_tokens),
    Measure(name="blocks read", unit="share of blocks", colour=GREEN, of=lambda body: body.entropic.share_read),
)


class Extremes:
    """The completions of the `EACH` requests at both extremes of every measure so far."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], list[tuple[float, int, str]]] = {}
        self._completions: dict[str, Sequence[Completion]] = {}
        self._count = itertools.count()

    def take(self, row: Mapping[str, Any], completions: Sequence[Completion]) -> None:
        """Record the completions of a request, and its row; they are kept while they are extreme."""
        body = msgspec.convert(row["response"]["body"], Body)
        self._completions[row["id"]] = completions
        for measure in MEASURES:
            value = measure.of(body)
            for sign in (1, -1):
                if value is None:
                    continue
                end = self._ends.setdefault((measure.name, sign), [])
                heapq.heappush(end, (sign * value, next(self._count), row["id"]))
                if len(end) > EACH:
                    heapq.heappop(end)
        named = {name for end in self._ends.values() for *_, name in end}
        self._completions = {name: completions for name, completions in self._completions.items() if name in named}

    def of(self, name: str) -> Sequence[Completion]:
        """Return the completions of the request whose row has this id, none if they are not kept."""
        return self._completions.get(name, ())


def write_batch_report(
    output: Path,
    path: Path,
    *,
    facts: Mapping[str, str],
    extremes: Extremes | None = None,
    decode: Decode | None = None,
) -> None:
    """Write a page on the rows of `output`, with the tokens of `extremes` if they are kept.

    Raises UsageError if there is no row, a line is not a row, or the page cannot be written.
    """
    spread = _Spread()
    for number, row in enumerate(read_rows(output), 1):
        spread.take(number, row)
    if not spread.total:
        raise UsageError(f"{output} has no row, so there is nothing to report and {path} is not written.")
    ends = spread.ends()
    shown = {number: row for number, row in enumerate(read_rows(output), 1) if number in ends}
    sections = [spread.section(ends, shown)]
    for number, row in shown.items():
        kept = () if extremes is None else extremes.of(row.id)
        sections += _request(number, row, ends[number], kept)
    write_page(f"Batch report: {spread.total} requests", {**facts, **spread.facts()}, sections, path, decode)


class _Spread:
    """The distributions of the measures of all rows."""

    def __init__(self) -> None:
        self.total = self._errors = 0
        self._numbers: list[int] = []
        self._values: dict[str, list[float]] = {measure.name: [] for measure in MEASURES}
        self._time: list[float] = []
        self._cost: list[float] = []

    def take(self, number: int, row: Row) -> None:
        self.total += 1
        if row.response is None:
            self._errors += 1
            return
        body = row.response.body
        self._numbers.append(number)
        for measure in MEASURES:
            value = measure.of(body)
            self._values[measure.name].append(np.nan if value is None else float(value))
        time, cost = body.entropic.entropic_time, body.entropic.cost_bytes
        self._time.append(np.nan if time is None else time)
        self._cost.append(np.nan if cost is None else cost / 1e6)

    def facts(self) -> dict[str, str]:
        tokens = int(np.nansum(self._values["tokens"]))
        return {
            "requests": f"{self.total}, {self._errors} with an error",
            "tokens": f"{tokens:,}",
            "entropic time": f"{formatted(sum(self._time), ',.1f')} nats",
            "cost": f"{formatted(sum(self._cost), ',.1f')} MB moved",
        }

    def ends(self) -> dict[int, list[str]]:
        """Return for each extreme row, by its number, the measures in which it is extreme."""
        found: dict[int, list[str]] = {}
        for measure in MEASURES:
            values = np.array(self._values[measure.name])
            known = np.flatnonzero(~np.isnan(values))
            if len(known) == 0 or values[known].min() == values[known].max():
                continue
            order = known[np.argsort(values[known], kind="stable")]
            for title, places in (("most", order[::-1][:EACH]), ("least", order[:EACH])):
                for place in places:
                    said = f"{title} {measure.name}: {values[place]:.4g} {measure.unit}"
                    found.setdefault(self._numbers[place], []).append(said)
        return dict(sorted(found.items()))

    def section(self, ends: Mapping[int, list[str]], shown: Mapping[int, Row]) -> Section:
        """Return the section on the distribution of the requests, with links to the extremes."""
        from markupsafe import Markup

        rows = [
            [
                Markup('<a href="#request-{}">{}</a>').format(number, _name(number, shown[number])),
                "; ".join(ends[number]),
            ]
            for number in ends
        ]
        tables = [TextTable(title="Requests at either end", heads=["request", "what sets it apart"], rows=rows)]
        return Section(
            id="spread",
            title="All requests",
            figures=[*self._histograms(), *self._scatter()],
            tables=tables if rows else [],
        )

    def _histograms(self) -> Iterator[Figure]:
        for measure in MEASURES:
            values = np.array(self._values[measure.name])
            values = values[~np.isnan(values)]
            if len(values) == 0:
                continue
            edges = np.linspace(values.min(), values.max(), _BINS + 1)
            if not (np.diff(edges) > 0).all():  # all equal, except for rounding
                continue
            counts, _ = np.histogram(values, bins=edges)
            label = measure.name if measure.unit == measure.name else f"{measure.name} ({measure.unit})"
            least, middle, greatest = np.quantile(values, (0, 0.5, 1))
            yield Figure(
                title=f"{measure.name[0].upper()}{measure.name[1:]} of requests",
                caption="How many requests have how much.",
                words=f"{len(values)} requests, {least:.3g} to {greatest:.3g} {measure.unit}, median {middle:.3g}.",
                spec=chart(
                    "bar",
                    160,
                    x=axis(label, bin={"binned": True}, title=label),
                    x2={"field": "to"},
                    y=axis("requests"),
                    color={"value": measure.colour},
                ),
                columns={label: plain(edges[:-1]), "to": plain(edges[1:]), "requests": counts.tolist()},
            )

    def _scatter(self) -> Iterator[Figure]:
        if not self._time:
            return
        step = -(-len(self._time) // MOST_POINTS)
        shown_points = slice(None, None, step)
        few = "" if step == 1 else f" One of {step} requests is shown."
        yield Figure(
            title="Entropic time against cost",
            caption=f"A dot is a request: the entropy that it resolved, against the bytes that this took.{few}",
            words=f"{formatted(sum(self._time), ',.1f')} nats for {formatted(sum(self._cost), ',.1f')} MB moved by "
            f"{len(self._time)} requests.",
            spec=chart(
                "point",
                260,
                mark={"filled": True, "opacity": 0.6},
                x=axis("cost (MB moved)"),
                y=axis("entropic time (nats)"),
                color={"value": PURPLE},
            ),
            columns={
                "line": self._numbers[shown_points],
                "cost (MB moved)": plain(np.array(self._cost)[shown_points]),
                "entropic time (nats)": plain(np.array(self._time)[shown_points]),
            },
        )


def _request(number: int, row: Row, said: Sequence[str], kept: Sequence[Completion]) -> list[Section]:
    """Return the sections of a request: one, or one for each continuation whose tokens are kept."""
    title = _name(number, row)
    if kept:
        ordered = sorted(kept, key=lambda completion: completion.index)
        return [
            Section(
                id=f"request-{number}" + (f"-{i}" if i else ""),
                title=title + (f", continuation {i + 1}" if len(ordered) > 1 else ""),
                notes=[f"{'; '.join(said)}."],
                facts=facts_of(completion),
                completion=completion,
                figures=of_completion(completion)[:1] if completion.trace else [],
            )
            for i, completion in enumerate(ordered)
        ]
    assert row.response is not None  # an error row has no measure
    texts = [choice.full_text for choice in row.response.body.choices]
    return [
        Section(
            id=f"request-{number}",
            title=title,
            notes=[
                f"{'; '.join(said)}.",
                "Its tokens were not measured in this run: its text is as the output has it.",
            ],
            plain="\n---\n".join(texts),
        )
    ]


def _name(number: int, row: Row) -> str:
    return f"Row {number}" if row.custom_id is None else f"Row {number}: {row.custom_id}"
