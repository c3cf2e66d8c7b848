"""Checks before any file is written that the files of a command are all different.

Existing files are compared by identity, not by spelling: a link, a hard link, `./` or, on a
case-insensitive file system, another case name the same file. A new file is compared by
its future place.
"""

import itertools
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from et_jax.errors import UsageError

_STREAMS = ("standard input", "standard output", "standard error")


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A path, or a stream that the shell opened, with its name; `found` is None if there is no file yet."""

    name: str
    path: Path | None
    written: bool
    found: os.stat_result | None

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.name} {self.path}"

    def is_same(self, other: "_Named") -> bool:
        if self.found is not None and other.found is not None:
            return os.path.samestat(self.found, other.found) and stat.S_ISREG(self.found.st_mode)
        if self.found is not None or other.found is not None or self.path is None or other.path is None:
            return False
        here, there = Path(os.path.realpath(self.path)), Path(os.path.realpath(other.path))
        if here.parent.exists() and there.parent.exists():
            return here.parent.samefile(there.parent) and _spelled(here.name) == _spelled(there.name)
        return _spelled(str(here)) == _spelled(str(there))


def check_paths(read: Mapping[str, Path | None], written: Mapping[str, Path | None], folder: Path | None) -> None:
    """Raise UsageError, naming both, if a file to be written is another one, a standard stream, or the model's.

    `read` and `written` have the paths of the command by their names, None if not given; `folder` is the model's.
    """
    named = [_named(name, path, False) for name, path in read.items() if path is not None]
    named += [_named(name, path, True) for name, path in written.items() if path is not None]
    named += _streams()
    for one, other in itertools.combinations(named, 2):  # read files first, the streams last
        if one.path is not None and (one.written or other.written) and one.is_same(other):
            first, second = (one, other) if other.path is None else (other, one)
            raise UsageError(f"{first} is the same file as {second}; choose another file.")
    if folder is not None:
        model_files = [os.stat(file) for file in _files(folder)]
        for one in named:
            same = one.found is not None and any(os.path.samestat(one.found, file) for file in model_files)
            if one.written and one.path is not None and (same or _lies_in(one.path, folder)):
                raise UsageError(f"{one} is a file of the model in {folder}; choose another file.")


def _named(name: str, path: Path, written: bool) -> _Named:
    try:
        found = os.stat(path)
    except OSError:
        found = None
    return _Named(name=name, path=path, written=written, found=found)


def _streams() -> Iterator[_Named]:
    """Yield the standard streams that are files."""
    for number, name in enumerate(_STREAMS):
        try:
            found = os.fstat(number)
        except OSError:  # closed
            continue
        yield _Named(name=name, path=None, written=number > 0, found=found)


def _spelled(name: str) -> str:
    """Return a name as a case-insensitive and Unicode-normalising file system compares it."""
    return unicodedata.normalize("NFC", name.casefold())


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a model's folder and of its orbax folder; or the single file of a model."""
    if folder.is_file():
        yield folder
    orbax = folder / "orbax"
    yield from (file for file in folder.glob("*") if file.is_file())
    yield from (file for file in orbax.rglob("*") if file.is_file())


def _lies_in(path: Path, folder: Path) -> bool:
    place, model = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return place.parent == model or place.is_relative_to(model / "orbax")
