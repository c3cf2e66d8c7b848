"""The output file: whole rows whatever happens, and never another job's."""

import errno
import json
import os

import pytest
from batch_rows import SETTINGS, begin, data, row
from hypothesis import given
from hypothesis import strategies as st

from et_jax.batch import journal as journals
from et_jax.batch.journal import open_journal
from et_jax.batch.manifest import manifest_path
from et_jax.errors import UsageError


def test_rows_are_appended_and_found_again_however_they_are_spelled(tmp_path):
    path = tmp_path / "out.jsonl"
    begin(path, "a", "b")
    with open_journal(path, SETTINGS) as journal:
        assert journal.recorded == {"a": "batch_req_a", "b": "batch_req_b"}
        journal.append(row("c", custom_id=None, error={"line": 7}))
        assert journal.recorded[7] == "batch_req_c"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\r\n" for each in rows))
    with open_journal(path, SETTINGS) as journal:
        assert journal.recorded == {"a": "batch_req_a", "b": "batch_req_b", 7: "batch_req_c"}


TORN = [
    b"{",
    b'{"id": "batch_req_c", "custom_id": "c", "response": {}, "error": null}',  # all but its end of line
    b"\0" * 50,
    b'{"id": "batch_req_c", "cus' + b"\0" * 4000,  # a loss of power leaves the size without the bytes
    b'{"id": "batch_req_c", "cus' + b"\0" * 4000 + b"null}\n",
]


@pytest.mark.parametrize("torn", TORN)
@pytest.mark.parametrize("names", ["", "ab"])
def test_a_torn_last_line_is_cut_off(tmp_path, torn, names):
    path = tmp_path / "out.jsonl"
    whole = begin(path, *names)
    path.write_bytes(whole + torn)
    with open_journal(path, SETTINGS) as journal:
        assert journal.recorded.keys() == set(names)
        journal.append(row("c"))
    assert path.read_bytes() == whole + data("c")


WHOLE, NAMELESS = data("c"), json.dumps(row("c", custom_id=None, error={"line": 7})).encode() + b"\n"
no_row = "line {} is no row of a job".format
NO_ROWS = [
    (lambda rows: json.dumps(json.loads(rows.splitlines()[0]), indent=2).encode() + b"\n", no_row(1)),
    (lambda rows: rows + b"a note of mine", no_row(3)),
    (lambda rows: rows + b"\n", no_row(3)),
    (lambda rows: rows + b'{"id": 1}\n', no_row(3)),
    # two torn lines; a torn line, and a row after it
    (lambda rows: rows + b'{"id": "batch_req_c", "cus\n{"id": "batch_req_d", "c', no_row(3)),
    (lambda rows: rows + b'{"id": "batch_req_c", "cus' + WHOLE, no_row(3)),
    (lambda rows: rows + b"[" * 100_000 + b"\n", no_row(3)),
    (lambda rows: rows + b'{"n": ' + b"9" * 5000 + b"}\n", no_row(3)),
    (lambda rows: rows + WHOLE.replace(b'"c"', b"true"), no_row(3)),
    (lambda rows: rows[:-1] + WHOLE, no_row(2)),  # two rows on a line
    (lambda rows: rows + data("a"), 'line 3 is a second row of custom_id "a"; remove one'),
    (lambda rows: rows + 2 * NAMELESS, "line 4 is a second row of input line 7; remove one"),
]


@pytest.mark.parametrize(("change", "said"), NO_ROWS)
def test_what_is_no_row_is_never_cut(tmp_path, change, said):
    path = tmp_path / "out.jsonl"
    path.write_bytes(change(begin(path, "a", "b")))
    before = path.read_bytes(), manifest_path(path).read_bytes()
    with pytest.raises(UsageError, match=rf"out\.jsonl: {said}"):
        begin(path)
    assert before == (path.read_bytes(), manifest_path(path).read_bytes())


def test_a_refused_job_leaves_its_output_as_it_was(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("a letter\n")
    with pytest.raises(UsageError, match="no job began it"):
        begin(path)
    assert path.read_text() == "a letter\n"
    path.unlink()
    manifest_path(path).mkdir()
    for there in (False, True):  # a file that was there stays
        if there:
            path.touch()
        with pytest.raises(UsageError, match=r"manifest\.json is not a regular file"):
            begin(path)
        assert path.exists() == there


def test_a_row_the_disk_takes_half_of_is_cut_off(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    write, room = os.write, [10]

    def nearly_full(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop()])

    with open_journal(path, SETTINGS) as journal:
        journal.append(row("a"))
        before = path.read_bytes()
        monkeypatch.setattr(journals.os, "write", nearly_full)
        with pytest.raises(UsageError, match=r"No space left on device\); its 1 rows are kept: make room"):
            journal.append(row("b"))
        assert path.read_bytes() == before and "b" not in journal.recorded
        monkeypatch.setattr(journals.os, "write", lambda file, data: write(file, data[:7]))  # short, not refused
        journal.append(row("c"))
    assert path.read_bytes() == before + data("c")


def test_rows_reach_the_disk_in_groups_of_at_most_a_second(tmp_path, monkeypatch):
    """The clock stands still but where it is moved: a forced write is due a second after the last."""
    synced, now = [], [100.0]
    monkeypatch.setattr(journals.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[0])
    path = tmp_path / "out.jsonl"
    with open_journal(path, SETTINGS) as journal:
        synced.clear()  # the manifest's
        journal.append(row("a"))
        first = path.stat().st_size
        journal.append(row("b"))
        now[0] += 0.9
        journal.append(row("c"))
        assert synced == [first]
        now[0] += 0.2
        journal.sync_if_due()
        assert synced == [first, 3 * first]
        journal.sync()  # nothing new
        journal.append(row("d"))
    assert synced == [first, 3 * first, 4 * first]


@given(draw=st.data())
def test_whatever_happens_to_an_output_at_most_its_last_line_goes(draw, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "out.jsonl"
    rows = begin(path, "a", "b", "c")
    start = draw.draw(st.integers(0, len(rows)))
    end = draw.draw(st.integers(start, min(len(rows), start + 40)))
    piece = draw.draw(st.binary(max_size=20) | st.sampled_from([b"", b"\n", b"\0" * 30, b"\r\n", b"{}", b"}\n{"]))
    path.write_bytes(before := rows[:start] + piece + rows[end:])
    try:
        with open_journal(path, SETTINGS):
            pass
    except UsageError as refusal:
        assert path.read_bytes() == before and "line" in str(refusal)
        return
    after = path.read_bytes()
    cut = before[len(after) :]
    assert before.startswith(after) and b"\n" not in cut[:-1] and (not cut or after[-1:] in (b"\n", b""))
    assert not cut or (cut.startswith((b"{", b"\0")) and (b"\0" in cut or not cut.endswith(b"\n")))
