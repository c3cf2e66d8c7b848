"""Lines of an input: numbered, bounded, and named by their content."""

import tracemalloc
from pathlib import Path

import pytest

from et_jax.batch.lines import MAX_LINE_BYTES, read_lines


def lines_of(path: Path, data: bytes) -> list[tuple[int, bytes | None]]:
    path.write_bytes(data)
    return [(line.number, line.data) for line in read_lines(path)]


def test_lines_are_numbered_as_in_an_editor_and_named_by_their_content_alone(tmp_path):
    found = lines_of(tmp_path / "in", b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}\r\n{"c": 3}')
    assert found == [(1, b'{"a": 1}\n'), (4, b'{"b": 2}\r\n'), (5, b'{"c": 3}')]
    digests = []
    for data in (b"abc", b"abc\n", b"abc\r\n", b"abd"):
        (tmp_path / "in").write_bytes(data)
        digests += [line.digest for line in read_lines(tmp_path / "in")]
    assert digests[0] == digests[1] == digests[2] != digests[3]


@pytest.mark.parametrize(("size", "kept"), [(MAX_LINE_BYTES, True), (MAX_LINE_BYTES + 1, False)])
def test_a_line_is_kept_up_to_the_limit(tmp_path, size, kept):
    for end in (b"", b"\n"):
        (_, data), *rest = lines_of(tmp_path / "in", b"x" * size + end + b"y" * bool(end))
        assert (data is not None) == kept and rest == ([(2, b"y")] if end else [])


def test_a_long_line_is_passed_over_in_pieces_and_its_digest_sees_all_of_it(tmp_path):
    path = tmp_path / "in"
    digests = []
    for last in (b"a", b"b"):
        path.write_bytes(b"x" * (6 * MAX_LINE_BYTES) + last + b"\nshort\n")
        tracemalloc.start()
        long, short = read_lines(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert long.data is None and short.data == b"short\n" and short.number == 2
        assert peak < 3 * MAX_LINE_BYTES
        digests.append(long.digest)
    assert digests[0] != digests[1]
