"""Compiled programs on disk: an entry is complete and verified by a digest, or it does not exist."""

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
from typing import Any

import jax
from jax._src import compilation_cache

_LOG = logging.getLogger(__name__)
_DIGEST = 32  # bytes at the beginning of an entry
_LEFT = 24 * 3600.0  # seconds after which a temporary file counts as abandoned
MOST_BYTES = 4 * 2**30  # of all entries of a folder
_CHECKS = 100  # how often the folder's size is checked while it fills


class ProgramStore:
    """A folder of programs by key, with the interface of JAX's persistent cache.

    Each entry is a digest of key and program, then the program. Entries with a wrong digest (a full disk, a bad copy,
    mixed-up names) are removed, and replaced when the program is compiled. The first entry that cannot be read, and the
    first that cannot be written, are logged. When the folder exceeds `most_bytes`, the least recently used entries are
    removed; the size is checked after every hundredth of that. With `own`, an entry that does not belong to the user,
    or that others may write to, counts as damaged.
    """

    def __init__(self, folder: Path, *, own: bool = False, most_bytes: int = MOST_BYTES) -> None:
        self._path = self.folder = folder  # the first is what JAX names in its log
        self._own, self._most_bytes = own, most_bytes
        self._unchecked = math.inf  # bytes written since the folder was last measured
        self._warned: set[str] = set()
        self._here = threading.local()

    def get(self, key: str) -> bytes | None:
        """Return the program stored under a key, or None."""
        if (asked := getattr(self._here, "asked", None)) is not None:
            asked.append(key)
        entry = self._entry(key)
        try:
            entry_bytes = self._read(entry)
        except FileNotFoundError:
            return None
        except OSError:  # a folder, or not readable
            entry_bytes = b""
        digest, program = entry_bytes[:_DIGEST], entry_bytes[_DIGEST:]
        if digest == _digest(key, program):
            return program
        self._warn(f"A compiled program in {self.folder} is damaged; such programs are compiled and stored anew.")
        with contextlib.suppress(OSError):  # another process may have been faster
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return None

    def put(self, key: str, program: bytes) -> None:
        """Store a program under a key, replacing any other."""
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
            self._warn(f"Compiled programs cannot be stored in {self.folder} ({reason}); make room, or name another.")
        else:
            self._unchecked += len(program) + _DIGEST
            if self._unchecked > self._most_bytes / _CHECKS:
                self._make_room()
                self._unchecked = 0

    def calls(self) -> "ProgramStore | None":
        """Return the store of call signatures, in a folder that only the user may write to; None if there is none."""
        folder = self.folder / "calls"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            reason = not_own(folder.lstat(), stat.S_ISDIR)
        except OSError as error:
            reason = str(error.strerror or error)
        if reason is None:
            return ProgramStore(folder, own=True)
        self._warn(f"Programs are traced at every start, for {folder} cannot be used ({reason}); remove it.")
        return None

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[str]]:
        """Collect the keys that JAX requests in this thread, in order."""
        self._here.asked = keys = []
        try:
            yield keys
        finally:
            self._here.asked = None

    def _read(self, entry: Path) -> bytes:
        """Return an entry's bytes, and update its access time. Raises OSError if it cannot be read or trusted."""
        with entry.open("rb") as file:
            about = os.fstat(file.fileno())
            if self._own and (reason := not_own(about, stat.S_ISREG)):
                raise OSError(reason)
            with contextlib.suppress(OSError):  # an entry of a shared folder
                os.utime(file.fileno(), ns=(time.time_ns(), about.st_mtime_ns))
            return file.read()

    def _make_room(self) -> None:
        """Remove abandoned temporary files and, while the folder is too large, the least recently used entries."""
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

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _LOG.warning(sentence)


def _digest(key: str, program: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST)
    digest.update(b"\n" + program)
    return digest.digest()


def not_own(about: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
    """Return why a file or folder is not exclusively the user's, or None; `is_kind` tests its file type.

    On systems without file owners the result is never None.
    """
    if not is_kind(about.st_mode):
        return "it is something else"
    if not hasattr(os, "geteuid"):
        return "this system reports no owner"
    if about.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write to it" if about.st_mode & 0o022 else None


def of_jax(client: Any) -> ProgramStore | None:
    """Return JAX's persistent cache for the devices of a client if it is a `ProgramStore`."""
    found = compilation_cache._get_cache(client) if compilation_cache.is_cache_used(client) else None
    return found if isinstance(found, ProgramStore) else None


def use(folder: Path) -> None:
    """Make JAX use a `ProgramStore` in a folder as its persistent cache.

    JAX's own store writes files in place and never rewrites them, so a torn file stays for ever. JAX has no setting for
    the store, so its factory function is replaced, for this folder only. If JAX's setting limits the cache size, its
    own store is used.
    """
    store, made = ProgramStore(folder), compilation_cache.get_file_cache

    def chosen(path: str) -> tuple | None:
        bounded = jax.config.jax_compilation_cache_max_size != -1
        return made(path) if bounded or path != str(folder) else (store, path)

    compilation_cache.get_file_cache = chosen
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
