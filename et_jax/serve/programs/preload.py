"""Loads programs while the weights are read that determine which ones they are.

A program's key has the shapes of the weights, and a large program takes as long to load as they do to read. So a start
notes its large programs, and the next start with the same settings begins with these.
"""

import hashlib
import json
from concurrent.futures import Future
from typing import Any

import jax
from jax._src import compilation_cache

from et_jax.io import later
from et_jax.serve.programs import store as program_store
from et_jax.serve.programs.key import start_key
from et_jax.serve.programs.store import ProgramStore

_LARGE = 2**18  # bytes, compressed: a program of 1.7 MB takes two seconds to load on a CPU
_Name = tuple[str, str]  # of a program in JAX's cache, and its digest
_begun: dict[_Name, Future[Any]] = {}
_used: list[_Name] = []


class GoneError(Exception):
    """A program is no longer in JAX's cache, or was recompiled."""


def digest_of(program: bytes) -> bytes:
    """Return the digest of a stored program."""
    return hashlib.blake2b(program, digest_size=32).digest()


def load(store: ProgramStore, name: str, digest: bytes, device: Any) -> Any:
    """Return a program that is loaded, or has been since `begin`. Raises GoneError if it is not stored."""
    begun = _begun.pop((name, digest.hex()), None) if device == jax.local_devices()[0] else None
    found, size = _read(store, name, digest, device) if begun is None else begun.result()
    count_used(name, digest, size)
    return found


def count_used(name: str, digest: bytes, size: int) -> None:
    """Count a stored program of `size` bytes as one that this start uses."""
    if size >= _LARGE:
        _used.append((name, digest.hex()))


def begin(settings: Any) -> None:
    """Begin to load the programs that the last start with these settings of the engine noted, in other threads."""
    _used.clear()
    for name, digest in _noted(settings):
        device = jax.local_devices()[0]
        store = program_store.of_jax(device.client)
        assert store is not None  # that has the note
        beside = later.worker(lasting=False)
        _begun[name, digest] = beside.submit(_read, store, name, bytes.fromhex(digest), device)
        beside.shutdown(wait=False)


def end(settings: Any) -> None:
    """Note the large programs that were used since `begin`, and drop those that it loaded in vain."""
    _begun.clear()
    calls = _notes()
    key = None if calls is None else start_key(settings)
    if calls is not None and key is not None and sorted(_used) != _noted(settings):
        calls.put(key, json.dumps(sorted(_used)).encode())


def _noted(settings: Any) -> list[_Name]:
    """Return the programs that a start with these settings noted."""
    calls = _notes()
    key = None if calls is None else start_key(settings)
    note = None if calls is None or key is None else calls.get(key)
    return [] if note is None else [(name, digest) for name, digest in json.loads(note)]


def _notes() -> ProgramStore | None:
    store = program_store.of_jax(jax.local_devices()[0].client)
    return None if store is None else store.calls()


def _read(store: ProgramStore, name: str, digest: bytes, device: Any) -> tuple[Any, int]:
    """Return a program and the bytes that store it."""
    program = store.get(name)
    if program is None or digest_of(program) != digest:
        raise GoneError
    serialized = compilation_cache.decompress_executable(program)
    executable, _ = compilation_cache.extract_executable_and_time(serialized)
    return device.client.deserialize_executable(executable, executable_devices=(device,)), len(program)
