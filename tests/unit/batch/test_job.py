"""A whole job on a model of paper: every line has one row, whatever its neighbours are."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
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
    ({"id": "hot", "prompt": "a", "temperature": -1}, "hot"),
    ({"id": "odd", "prompt": "a", "tempo": 1}, "odd"),
    ({"id": "wrong type", "prompt": 5}, "wrong type"),
    ({"id": "long", "prompt": "a" * 101}, "long"),
    (b'{"id": "huge", "prompt": "' + b"x" * 10_000_000 + b'"}', None),
]


def test_bad_lines_have_error_rows_and_good_ones_do_not_notice(tmp_path: Path) -> None:
    good = numbered(20)
    mixed: list[dict[str, Any] | bytes] = [*good]
    for place, (line, _) in enumerate(BAD):
        mixed.insert(2 * place + 2, line)
    summary, rows = serve(write(tmp_path, *mixed))
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows if row["response"]}
    expected = {}
    for line in good:
        digest = hashlib.sha256(f"{line['prompt']} {DEFAULTS.params} 0".encode())
        expected[line["id"]] = digest.hexdigest()[:4]
    assert answers == expected
    errors = {row["error"]["line"]: row["custom_id"] for row in rows if row["error"]}
    assert errors == {mixed.index(line) + 1: name for line, name in BAD}
    codes = {row["error"]["code"] for row in rows if row["custom_id"] == "long"}
    assert codes == {"failed"}
    assert (summary.total, summary.answered, summary.refused, summary.tokens) == (29, 20, 9, 80)
    assert "29 lines: 20 answered, 9 error rows; 80 tokens" in str(summary)


def test_done_is_done_errors_included(tmp_path: Path) -> None:
    source = write(tmp_path, *numbered(3), *[line for line, _ in BAD])
    _, before = serve(source)
    source.write_bytes(source.read_bytes() + b"\n" + json.dumps({"id": "new", "prompt": "a"}).encode())
    summary, after = serve(source)
    assert after[:-1] == before and after[-1]["custom_id"] == "new"
    assert (summary.total, summary.before, summary.answered, summary.refused) == (13, 12, 1, 0)


def test_a_line_changed_under_its_name_is_refused_before_any_work(tmp_path: Path) -> None:
    serve(write(tmp_path, *numbered(3)))
    lines = numbered(3)
    lines[1]["temperature"] = 0.5
    with pytest.raises(UsageError, match=r'Line 2 \(custom_id "r1"\) is not the line that'):
        serve(write(tmp_path, *lines, {"id": "new", "prompt": "a"}))
    assert b'"new"' not in (tmp_path / "out.jsonl").read_bytes()


def test_a_moved_line_is_still_itself(tmp_path: Path) -> None:
    serve(write(tmp_path, *numbered(3)))
    summary, rows = serve(write(tmp_path, b"", *reversed(numbered(4))))
    assert len(rows) == 4 and summary.answered == 1


def test_all_continuations_share_a_row(tmp_path: Path) -> None:
    _, rows = serve(write(tmp_path, {"id": "a", "prompt": "It was", "n": 3}, *numbered(9)))
    (row,) = [row for row in rows if row["custom_id"] == "a"]
    assert len(rows) == 10
    assert [choice["index"] for choice in row["response"]["body"]["choices"]] == [0, 1, 2]
    assert row["response"]["body"]["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


class Failing(PaperModel):
    """Damaged: the second of three continuations ends in an error."""

    def continue_(self, request: GenerationRequest) -> Iterator[Completion]:
        for each in super().continue_(request):
            bad = each.index == 1
            yield completion("", "ab", 1, finish_reason="error", error="It is damaged.") if bad else each


def test_one_failed_continuation_fails_its_line_once(tmp_path: Path) -> None:
    summary, rows = serve(write(tmp_path, {"id": "a", "prompt": "It was", "n": 3}, *numbered(4)), Failing())
    assert sorted(row["custom_id"] for row in rows) == ["a", "r0", "r1", "r2", "r3"]
    assert [row["error"]["message"] for row in rows if row["error"]] == ["It is damaged."]
    assert (summary.answered, summary.refused) == (4, 1)


def test_the_input_is_read_as_it_is_served(tmp_path: Path) -> None:
    """No more requests are drawn from the file than the engine asks for."""
    source = write(tmp_path, *numbered(50))
    model, seen = PaperModel(ahead=5), []

    class Watching(PaperModel):
        def as_completed(self, requests: Iterable[GenerationRequest], **more: Any) -> Iterator[tuple[int, Completion]]:
            def watched() -> Iterator[GenerationRequest]:
                for request in requests:
                    seen.append(len((tmp_path / "out.jsonl").read_bytes().splitlines()))
                    yield request

            return model.as_completed(watched(), **more)

    serve(source, Watching())
    assert all(rows >= drawn - 5 for drawn, rows in enumerate(seen)) and len(seen) == 50


def test_what_an_interrupt_cut_short_is_done_again(tmp_path: Path) -> None:
    source = write(tmp_path, *numbered(30))
    output = tmp_path / "out.jsonl"
    summary, rows = serve(source, cancelled=lambda: output.read_bytes().count(b"\n") >= 7)
    assert (len(rows), summary.done, summary.total) == (7, 7, 30)
    assert all(row["response"] for row in rows)
    summary, rows = serve(source)
    assert (len(rows), summary.before, summary.answered) == (30, 7, 23)


def test_a_prompt_that_cannot_be_served_has_one_row_however_many_were_asked_for(tmp_path: Path) -> None:
    _, rows = serve(write(tmp_path, {"id": "a", "prompt": "a" * 101, "n": 3}, *numbered(4)))
    assert sorted(row["custom_id"] for row in rows) == ["a", "r0", "r1", "r2", "r3"]


class Forgetful(PaperModel):
    """Serves all requests but the first."""

    def as_completed(self, requests: Iterable[GenerationRequest], **more: Any) -> Iterator[tuple[int, Completion]]:
        yield from (each for each in super().as_completed(requests, **more) if each[0])


def test_a_line_the_engine_forgets_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="1 requests unanswered"):
        serve(write(tmp_path, *numbered(3)), Forgetful())


def test_counters_are_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.txt"
    serve(write(tmp_path, *numbered(6)), metrics_file=metrics)
    assert 'et_jax_requests_finished_total{reason="length"} 6\n' in metrics.read_text()


def test_progress_is_said_now_and_then(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("et_jax.batch.progress.LINE_SECONDS", 0.0)
    serve(write(tmp_path, *numbered(6)))
    said = capfd.readouterr().err
    assert "3 of 6 lines" in said and "tokens/s" in said
    serve(write(tmp_path, *numbered(6), *[{"id": f"bad {i}"} for i in range(4)]))  # refused before any is served
    assert "8 of 10 lines" in capfd.readouterr().err


@pytest.mark.parametrize(
    "mended",
    [
        [b'{"id": "b", "prompt": "It was"}', b'{"id": "c", "prompt": "a"}'],
        [b'{"prompt": "It was"}', b'{"id": "c", "prompt": "a"}'],
        [b"{still bad", b'{"id": "c", "prompt": "a"}'],
        [b'{"id": "c", "prompt": "a"}', b"{"],  # moved: it has the number of another line
        [b'{"id": "c", "prompt": "a"}'],  # taken out
        [b"", b'{"id": "c", "prompt": "a"}'],
    ],
)
def test_an_error_row_does_not_outlive_its_line(tmp_path: Path, mended: list[bytes]) -> None:
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


def changed_amid(path: Path, change: Any) -> tuple[str, list[Any]]:
    """What is said of an input of 30 lines that is changed when 10 rows are there, and the rows."""
    source, output = write(path, *numbered(30)), path / "out.jsonl"

    class Disturbing(PaperModel):
        done = False

        def continue_(self, request: GenerationRequest) -> Iterator[Completion]:
            if not self.done and output.read_bytes().count(b"\n") >= 10:
                self.done = True
                change(source)
            return super().continue_(request)

    with pytest.raises(UsageError) as caught:
        serve(source, Disturbing())
    return str(caught.value), [json.loads(line) for line in output.read_bytes().splitlines()]


def end_of(path: Path, number: int) -> int:
    """The size of the first lines of a file."""
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[:number])


PADDED = [{"id": f"r{i}", "prompt": f"It was {i}", "metadata": "x" * 100_000} for i in range(30)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda source: os.truncate(source, 1_000_000), r"line \d+ is another than at the start"),
        (lambda source: os.truncate(source, 0), r"line \d+ is another than at the start"),
        (lambda source: os.truncate(source, end_of(source, 25)), "it has 25 lines, not 30"),
        (lambda source: source.open("a").write('\n{"id": "new", "prompt": "a"}'), "it has more than 30 lines"),
        (lambda source: source.write_text(source.read_text().replace("It was 2", "It is 2")), "line .* is another"),
    ],
)
def test_an_input_that_changes_amid_the_job_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    monkeypatch.setitem(globals(), "numbered", lambda count: PADDED[:count])
    said, rows = changed_amid(tmp_path, change)
    assert re.search(rf"in\.jsonl was changed while the job ran \({words}", said)
    assert f"rows in {tmp_path / 'out.jsonl'} are kept" in said
    assert len(rows) >= 10 and all(row["response"] for row in rows)  # no error row of half a line
    assert {row["custom_id"] for row in rows} <= {line["id"] for line in PADDED}
    summary, rows = serve(write(tmp_path, *PADDED))
    assert len(rows) == 30 and summary.before >= 10


def test_an_input_that_is_removed_amid_the_job_was_open(tmp_path: Path) -> None:
    source = write(tmp_path, *numbered(30))

    class Removing(PaperModel):
        def continue_(self, request: GenerationRequest) -> Iterator[Completion]:
            source.unlink(missing_ok=True)
            return super().continue_(request)

    summary, rows = serve(source, Removing())
    assert len(rows) == 30 and summary.done == summary.total


def test_an_input_that_is_gone_before_the_first_request_is_told_of(tmp_path: Path) -> None:
    source = write(tmp_path, *numbered(3))
    with open_journal(tmp_path / "out.jsonl", SETTINGS) as journal:
        summary = survey(source, journal)
        source.unlink()
        with pytest.raises(UsageError, match=r"in\.jsonl cannot be read \(No such file"):
            run(PaperModel(), source, journal, DEFAULTS, summary)


def test_the_summary_names_the_fields_that_were_ignored_once(tmp_path: Path) -> None:
    lines = [line | {"verbosity": "low", "model": "any"} for line in numbered(3)]
    source = write(tmp_path, *lines, {"prompt": "It was", "id": "last", "service_tier": "flex"})
    assert "; ignored: service_tier, verbosity]" in str(serve(source)[0])
    assert "; ignored: service_tier, verbosity]" in str(serve(source)[0])  # of lines that have their rows
    assert "ignored" not in str(Summary())
