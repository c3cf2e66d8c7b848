"""Compiled programs on disk: an entry is the program that was kept under its key, whole, or it is not there."""

import contextlib
import hashlib
import logging
import math
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache

_LOG = logging.getLogger(__name__)
_DIGEST = 32  # bytes at the beginning of an entry
_LEFT = 24 * 3600.0  # seconds after which what a process was writing is taken to have been left by it
MOST_BYTES = 4 * 2**30  # of all entries of a folder
_CHECKS = 100  # times that a folder is measured while it fills


class ProgramStore:
    """A folder of programs by key, as JAX asks for them and hands them over.

    A digest of key and program stands before the program. Entries that have another, because a disk was full, a copy
    went wrong or names were mixed up, are removed, and what is compiled in their place is kept. Of the first that
    cannot be read, and of the first that cannot be kept, a sentence is logged. When the folder exceeds `most_bytes`,
    the least recently used entries are removed; it is measured after every hundredth of that. With `own` an entry that
    is not the user's, or that others may write, is as a damaged one.
    """

    def __init__(self, folder: Path, *, own: bool = False, most_bytes: int = MOST_BYTES) -> None:
        self._path = self.folder = folder  # the first is what JAX names in its log
        self._own, self._most_bytes = own, most_bytes
        self._unchecked = math.inf  # bytes written since the folder was last measured
        self._told: set[str] = set()
        self._here = threading.local()

    def get(self, key: str) -> bytes | None:
        """Return the program kept under a key, None where there is none."""
        if (asked := getattr(self._here, "asked", None)) is not None:
            asked.append(key)
        entry = self._entry(key)
        try:
            kept = self._read(entry)
        except FileNotFoundError:
            return None
        except OSError:  # a folder, or nothing that may be read
            kept = b""
        digest, program = kept[:_DIGEST], kept[_DIGEST:]
        if digest == _digest(key, program):
            return program
        self._tell(f"A compiled program in {self.folder} is damaged; such programs are compiled and kept anew.")
        with contextlib.suppress(OSError):  # another process may have been faster
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return None

    def put(self, key: str, program: bytes) -> None:
        """Keep a program under a key, in the place of any other."""
        beside = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".new", delete=False) as file:
                beside = Path(file.name)
                file.write(_digest(key, program) + program)
            os.replace(beside, self._entry(key))
        except OSError as error:
            if beside is not None:
                with contextlib.suppress(OSError):
                    beside.unlink()
            reason = error.strerror or error
            self._tell(f"Compiled programs cannot be kept in {self.folder} ({reason}); make room, or name another.")
        else:
            self._unchecked += len(program) + _DIGEST
            if self._unchecked > self._most_bytes / _CHECKS:
                self._make_room()
                self._unchecked = 0

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[str]]:
        """Gather the keys that this thread asks for, in order, as JAX does of every program that it needs."""
        self._here.asked = keys = []
        try:
            yield keys
        finally:
            self._here.asked = None

    def _read(self, entry: Path) -> bytes:
        """Return what an entry holds, and note that it was used. Raises OSError where it cannot be read, or used."""
        with entry.open("rb") as file:
            about = os.fstat(file.fileno())
            if self._own and (reason := not_own(about, stat.S_ISREG)):
                raise OSError(reason)
            with contextlib.suppress(OSError):  # one of a folder that others write
                os.utime(file.fileno(), ns=(time.time_ns(), about.st_mtime_ns))
            return file.read()

    def _make_room(self) -> None:
        """Remove what was left half written and, while there is too much, what was used last the longest ago."""
        for half in self.folder.glob(".*.new"):
            with contextlib.suppress(OSError):
                if half.stat().st_mtime < time.time() - _LEFT:
                    half.unlink()
        used = []
        for entry in self.folder.glob("*.program"):
            with contextlib.suppress(OSError):  # another process may have been faster
                about = entry.stat()
                used.append((about.st_atime_ns, about.st_size, entry))
        too_much = sum(size for _, size, _ in used) - self._most_bytes
        for _, size, entry in sorted(used):
            if too_much <= 0:
                return
            with contextlib.suppress(OSError):
                entry.unlink()
            too_much -= size

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.program"

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _LOG.warning(sentence)


def _digest(key: str, program: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST)
    digest.update(b"\n" + program)
    return digest.digest()


def not_own(about: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
    """Return why a file or folder is not the user's own, None where it is; `is_kind` says whether it is what it should.

    Systems without owners of files have none that is.
    """
    if not is_kind(about.st_mode):
        return "it is something else"
    if not hasattr(os, "geteuid"):
        return "this system tells no owner"
    if about.st_uid != os.geteuid():
        return "it belongs to somebody else"
    return "others may write to it" if about.st_mode & 0o022 else None


def use(folder: Path) -> None:
    """Have JAX keep programs in a folder, by a `ProgramStore`.

    JAX has settings for the folder and for what is kept, and none for how: what it writes by itself may stay torn for
    ever, for it writes into the file's place and never writes a file twice. So what makes its store is replaced, for
    this folder alone. A bound on the folder's size is kept by JAX's own store.
    """
    store, made = ProgramStore(folder), compilation_cache.get_file_cache

    def chosen(path: str) -> tuple | None:
        bounded = jax.config.jax_compilation_cache_max_size != -1
        return made(path) if bounded or path != str(folder) else (store, path)

    compilation_cache.get_file_cache = chosen
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
