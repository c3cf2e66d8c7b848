"""The lines of an input file, one at a time, with a digest of each: JSON lines, or the rows of a Parquet file."""

import codecs
import dataclasses
import hashlib
from collections.abc import Iterator, Set
from pathlib import Path

from et_jax.batch.parquet import read_rows
from et_jax.batch.source import PARQUET
from et_jax.errors import UsageError

MAX_LINE_BYTES = 8 * 2**20  # a million tokens of text with escapes; also the most bytes of a line in memory
_PIECE_BYTES = 2**20  # of the reads that skip the rest of a longer line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line: its number from 1, its bytes (None if there are over `MAX_LINE_BYTES`), and their digest.

    `problem` says why a row of a Parquet file cannot be converted to JSON.
    """

    number: int
    data: bytes | None
    digest: bytes
    problem: str | None = None


def read_lines(path: Path, column: str | None = None, others: Set[str] = frozenset()) -> Iterator[Line]:
    """Yield the lines of `path` that are not blank, or the rows of a Parquet file, or of a data set in a folder.

    If `column` is given, rows are reduced to it and to those of `others` that exist. Raises UsageError if the file
    cannot be read, or lacks the column.
    """
    try:
        yield from (_rows(path, column, others) if _has_rows(path) else _json_lines(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); correct it and run again.") from error


def _has_rows(path: Path) -> bool:
    if path.suffix == ".parquet" or path.is_dir():
        return True
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET


def _json_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            content = data.rstrip(b"\r\n")
            digest = hashlib.blake2b(content, digest_size=16)
            fits, blank, piece = len(content) <= MAX_LINE_BYTES, not data.strip(), data[-1:]
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(_PIECE_BYTES)
                digest.update(piece.rstrip(b"\r\n"))
            if not (fits and blank):
                yield Line(number=number, data=data if fits else None, digest=digest.digest())


def _rows(path: Path, column: str | None, others: Set[str]) -> Iterator[Line]:
    for number, (data, problem) in enumerate(read_rows(path, column, others), 1):
        digest = hashlib.blake2b(data, digest_size=16).digest()
        fitting = data if len(data) <= MAX_LINE_BYTES else None
        yield Line(number=number, data=fitting, digest=digest, problem=problem)
