"""A whole job on a model of paper: every line has one row, whatever its neighbours are."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import PaperModel, completion

from et_jax.batch.job import Summary, run, survey
from et_jax.batch.journal import open_journal
from et_jax.batch.tasks import Defaults
from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams

DEFAULTS = Defaults(params=SamplingParams(max_tokens=4))
SETTINGS = {"model_files": "paper"}


def serve(source: Path, model: PaperModel | None = None, **more: Any) -> tuple[Summary, list[dict[str, Any]]]:
    output = source.with_name("out.jsonl")
    with open_journal(output, SETTINGS) as journal:
        summary = survey(source, journal)
        run(model or PaperModel(), source, journal, DEFAULTS, summary, **more)
    return summary, [json.loads(line) for line in output.read_bytes().splitlines()]


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    source = path / "in.jsonl"
    source.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return source


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": f"It was {i}"} for i in range(count)]


BAD = [
    (b"{", None),
    (b'{"prompt": "caf\xe9"}', None),
    ({"prompt": "a", "id": "r1"}, None),  # a name that is taken
    ({"id": "no prompt"}, "no prompt"),
    ({"id": "odd", "prompt": "a", "tempo": 1}, "odd"),
    ({"id": "long", "prompt": "a" * 101}, "long"),
    (b'{"id": "huge", "prompt": "' + b"x" * 10_000_000 + b'"}', None),
]


def test_bad_lines_have_error_rows_and_good_ones_do_not_notice(tmp_path):
    good = numbered(20)
    mixed: list[dict[str, Any] | bytes] = [*good]
    for place, (line, _) in enumerate(BAD):
        mixed.insert(2 * place + 2, line)
    summary, rows = serve(write(tmp_path, *mixed))
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows if row["response"]}
    digests = [hashlib.sha256(f"{line['prompt']} {DEFAULTS.params} 0".encode()).hexdigest() for line in good]
    assert answers == {line["id"]: digest[:4] for line, digest in zip(good, digests, strict=True)}
    errors = {row["error"]["line"]: row["custom_id"] for row in rows if row["error"]}
    assert errors == {mixed.index(line) + 1: name for line, name in BAD}
    assert (summary.total, summary.answered, summary.refused, summary.tokens) == (27, 20, 7, 80)
    assert "27 lines: 20 answered, 7 error rows; 80 tokens" in str(summary)


def test_done_is_done_wherever_a_line_stands_errors_included(tmp_path):
    lines = [*numbered(3), *[line for line, _ in BAD]]
    _, before = serve(write(tmp_path, *lines))
    summary, after = serve(write(tmp_path, *lines, {"id": "new", "prompt": "a"}))
    assert after[:-1] == before and after[-1]["custom_id"] == "new"
    assert (summary.total, summary.before, summary.answered, summary.refused) == (11, 10, 1, 0)
    _, moved = serve(write(tmp_path, lines[2], lines[1], lines[0], *lines[3:], b"", {"id": "new", "prompt": "a"}))
    assert moved == after


class Failing(PaperModel):
    """Damaged: the second continuation of a prompt ends in an error."""

    def continue_(self, request: GenerationRequest) -> Iterator[Completion]:
        for each in super().continue_(request):
            bad = each.index == 1 and request.prompt == "bad"
            yield completion("", "ab", 1, finish_reason="error", error="It is damaged.") if bad else each


def test_a_line_has_one_row_however_many_continuations_it_asks_for(tmp_path):
    asked = [{"id": prompt[:3], "prompt": prompt, "n": 3} for prompt in ("It was", "bad", "a" * 101)]
    summary, rows = serve(write(tmp_path, *asked, *numbered(9)), Failing())
    assert sorted(row["custom_id"] for row in rows) == ["It ", "aaa", "bad", *(f"r{i}" for i in range(9))]
    by_name = {row["custom_id"]: row for row in rows}
    body = by_name["It "]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    assert by_name["bad"]["error"]["message"] == "It is damaged." and by_name["aaa"]["error"]["code"] == "failed"
    assert (summary.answered, summary.refused) == (10, 2)


def test_the_input_is_read_as_it_is_served(tmp_path):
    """No more requests are drawn from the file than the engine asks for."""
    source, output, seen = write(tmp_path, *numbered(50)), tmp_path / "out.jsonl", []
    serve(source, PaperModel(ahead=5, before=lambda _: seen.append(output.read_bytes().count(b"\n"))))
    assert all(rows >= drawn - 5 for drawn, rows in enumerate(seen)) and len(seen) == 50


@pytest.mark.parametrize(
    "mended",
    [
        [b'{"id": "b", "prompt": "It was"}', b'{"id": "c", "prompt": "a"}'],
        [b"{still bad", b'{"id": "c", "prompt": "a"}'],
        [b'{"id": "c", "prompt": "a"}', b"{"],  # moved: it has the number of another line
        [b'{"id": "c", "prompt": "a"}'],  # taken out
    ],
)
def test_an_error_row_does_not_outlive_its_line(tmp_path, mended):
    """Else there were two rows, of which one is of a line that is no more."""
    first = b'{"id": "a", "prompt": "It was"}'
    source, output = write(tmp_path, first, b"{", b'{"id": "c", "prompt": "a"}'), tmp_path / "out.jsonl"
    serve(source)
    before = output.read_bytes()
    with pytest.raises(UsageError, match=r'Line 2 .* take that row \("line": 2\) out of it') as refusal:
        serve(write(tmp_path, first, *mended))
    assert output.read_bytes() == before and str(refusal.value).endswith(".")
    output.write_bytes(b"".join(row for row in before.splitlines(keepends=True) if b'"line": 2' not in row))
    _, rows = serve(source)
    assert len(rows) == len({row["custom_id"] for row in rows}) == sum(bool(line) for line in [first, *mended])


def disturbing(source: Path, change: Callable[[Path], object]) -> PaperModel:
    """A model that changes its input once, when ten rows are written."""
    output, left = source.with_name("out.jsonl"), [change]

    def before(_: GenerationRequest) -> None:
        if left and output.read_bytes().count(b"\n") >= 10:
            left.pop()(source)

    return PaperModel(before=before)


def end_of(path: Path, number: int) -> int:
    """The size of the first lines of a file."""
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[:number])


PADDED = [{"id": f"r{i}", "prompt": f"It was {i}", "metadata": "x" * 100_000} for i in range(30)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda source: os.truncate(source, 0), r"line \d+ is another than at the start"),
        (lambda source: os.truncate(source, end_of(source, 25)), "it has 25 lines, not 30"),
        (lambda source: source.open("a").write('\n{"id": "new", "prompt": "a"}'), "it has more than 30 lines"),
        (lambda source: source.write_text(source.read_text().replace("It was 2", "It is 2")), "line .* is another"),
    ],
)
def test_an_input_that_changes_amid_the_job_is_told_of(tmp_path, change, words):
    source, output = write(tmp_path, *PADDED), tmp_path / "out.jsonl"
    with pytest.raises(UsageError) as caught:
        serve(source, disturbing(source, change))
    rows = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert re.search(rf"in\.jsonl was changed while the job ran \({words}", str(caught.value))
    assert f"rows in {output} are kept" in str(caught.value)
    assert len(rows) >= 10 and all(row["response"] for row in rows)  # no error row of half a line
    summary, rows = serve(write(tmp_path, *PADDED))
    assert len(rows) == 30 and summary.before >= 10
    assert {row["custom_id"] for row in rows} == {line["id"] for line in PADDED}


def test_an_input_that_is_removed_is_read_on_if_it_was_open(tmp_path):
    source = write(tmp_path, *PADDED)
    summary, rows = serve(source, disturbing(source, os.unlink))
    assert len(rows) == 30 and summary.done == summary.total
    source = write(tmp_path, *PADDED, *numbered(31)[30:])
    with open_journal(tmp_path / "out.jsonl", SETTINGS) as journal:
        summary = survey(source, journal)
        source.unlink()
        with pytest.raises(UsageError, match=r"in\.jsonl cannot be read \(No such file"):
            run(PaperModel(), source, journal, DEFAULTS, summary)
