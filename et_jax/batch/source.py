"""The input of a job: a file, or a pipe, which is first copied to a temporary file.

The lines are read twice, once to find those that are done and once to complete the rest; a pipe can be read only once.
"""

import codecs
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from et_jax.batch.parquet import saved_files
from et_jax.errors import UsageError

PARQUET = b"PAR1"  # the first bytes of a Parquet file
_LOOKED_AT = 2**16  # bytes at the start that are inspected
_PIECE_BYTES = 2**20
_UNPACK, _SPELL = "unpack it first", "write it again as JSON lines"
_KINDS = {
    b"\x1f\x8b": ("is compressed with gzip", _UNPACK),
    b"BZh": ("is compressed with bzip2", _UNPACK),
    b"\xfd7zXZ\0": ("is compressed with xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", _UNPACK),
    b"PK\x03\x04": ("is a zip archive", _UNPACK),
    b"%PDF": ("is a PDF", _SPELL),
    b"SQLite format 3\0": ("is an SQLite database", _SPELL),
    b"ARROW1": ("is an Arrow file", "write it as Parquet or as JSON lines"),
    **dict.fromkeys(
        (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE, b"{\0", b"\0{"),
        ("is UTF-16 or UTF-32", "save it as UTF-8"),
    ),
}


def check_source(source: Path) -> None:
    """Raise UsageError unless an input is a file of lines, a data set, or a pipe."""
    try:
        mode = source.stat().st_mode
    except FileNotFoundError as error:
        raise UsageError(f"{source} does not exist; name a file of prompts with --input.") from error
    except OSError as error:
        raise UsageError(f"{source} cannot be read ({error.strerror}); name a file of prompts.") from error
    if stat.S_ISDIR(mode):
        saved_files(source)
    elif stat.S_ISREG(mode):
        check_lines(source, str(source))
    elif not stat.S_ISFIFO(mode):
        raise UsageError(f"{source} is neither a file nor a pipe; name a file of prompts with --input.")


@contextmanager
def spooled(source: Path) -> Iterator[Path]:
    """Yield a file with the lines of `source`: itself, or a temporary copy of a pipe, removed at the end.

    Only the user can read the copy, in the folder for temporary files (TMPDIR). Raises UsageError if the disk is full,
    or the content is not a file of lines.
    """
    if source.is_file() or source.is_dir():
        yield source
        return
    try:
        copy = tempfile.NamedTemporaryFile(prefix="et_jax-", suffix=".jsonl")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise _no_room(source, error) from error
    with copy:
        try:
            with source.open("rb") as pipe:
                shutil.copyfileobj(pipe, copy, _PIECE_BYTES)
            copy.flush()
        except OSError as error:
            raise _no_room(source, error) from error
        check_lines(Path(copy.name), str(source))
        yield Path(copy.name)


def _no_room(source: Path, error: OSError) -> UsageError:
    folder = tempfile.gettempdir()
    return UsageError(
        f"{source} cannot be copied to {folder} ({error.strerror}); point TMPDIR to a folder with room, or name a file."
    )


def check_lines(path: Path, name: str) -> None:
    """Check from its beginning that a file, called `name` in errors, has lines of JSON, or is Parquet.

    Some invalid lines are accepted if others are valid. Raises UsageError that says what the file seems to be.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LOOKED_AT)
    except OSError as error:
        raise UsageError(f"{name} cannot be read ({error.strerror}); name a file of prompts.") from error
    if data.startswith(PARQUET) or path.suffix == ".parquet":
        return
    kinds = [kind for start, kind in _KINDS.items() if data.startswith(start)]
    kind = kinds[0] if kinds else _guessed(data)
    if kind is not None:
        what, advice = kind
        raise UsageError(f"{name} {what}; {advice}.")


def _guessed(data: bytes) -> tuple[str, str] | None:
    """Return what the beginning of a file seems to be, and what to do; None if it has JSON lines or is empty."""
    pieces = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    complete = pieces if len(data) < _LOOKED_AT else pieces[:-1]  # the last line is incomplete
    lines = [line.strip() for line in complete if line.strip()]
    opens = [line for line in pieces if line.lstrip().startswith(b"{")]
    if not lines:
        return None
    if lines[0] == b"[" or lines[0].startswith(b"[{"):
        return "is one JSON list", "write each of its objects on a line (jq -c '.[]')"
    if lines[0] == b"{" and len(lines) > 1 and lines[1].startswith(b'"'):
        return "has objects of more than one line", "write each on a line (jq -c .)"
    if opens:
        return None
    if b"\0" in data:
        return "is no text", "name a file of JSON lines or Parquet"
    if lines[0].startswith(b"["):
        return "is one JSON list", "write an object on each line"
    if any(mark in lines[0] for mark in (b",", b";", b"\t")):
        return "seems to be a table (CSV)", 'write each row as {"prompt": "..."} on a line'
    return "seems to be plain text", 'write each prompt as {"prompt": "..."} on a line'
