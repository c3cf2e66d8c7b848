"""A whole job on a model of paper: every line has one row, whatever its neighbours are."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import PaperModel, completion

from et_jax.batch.job import Summary, run, survey
from et_jax.batch.journal import open_journal
from et_jax.batch.tasks import Defaults
from et_jax.requests import Completion, GenerationRequest, SamplingParams
from et_jax.types import UsageError

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
    with pytest.raises(UsageError, match=r"Line 2 \(custom_id r1\) is not the line that"):
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
    assert "3 of 6 lines" in said and "tokens/s" in said and "left" in said
    serve(write(tmp_path, *numbered(6), *[{"id": f"bad {i}"} for i in range(4)]))  # refused before any is served
    assert "8 of 10 lines" in capfd.readouterr().err
