"""Loads programs while the weights are read that determine which ones they are.

A program's key has the shapes of the weights, and a large program takes as long to load as they do to read. So a start
notes the programs that took long to load, and the next start with the same settings begins with these.
"""

import hashlib
import json
import threading
import time
from concurrent.futures import Future
from typing import Any

import jax
from jax._src import compilation_cache

from et_jax.io import later
from et_jax.serve.programs import store as program_store
from et_jax.serve.programs.key import start_key
from et_jax.serve.programs.store import ProgramStore

_LONG = 0.2  # seconds
_Name = tuple[str, str]  # of a program in JAX's cache, and its digest
_lock = threading.Lock()
_begun: dict[_Name, Future[Any]] = {}
_long: list[_Name] = []


class GoneError(Exception):
    """A program is no longer in JAX's cache, or was recompiled."""


def digest_of(program: bytes) -> bytes:
    """Return the digest of a stored program."""
    return hashlib.blake2b(program, digest_size=32).digest()


def program(store: ProgramStore, name: str, digest: bytes, device: Any) -> Any:
    """Return a program that is loaded, or has been since `begin`. Raises GoneError if it is not stored."""
    wanted = name, digest.hex()
    with _lock:
        begun = _begun.pop(wanted, None) if device == jax.local_devices()[0] else None
    began = time.monotonic()
    found = begun.result() if begun is not None else _loaded(store, name, digest, device)
    if begun is not None or time.monotonic() - began > _LONG:
        _long.append(wanted)
    return found


def begin(settings: Any) -> None:
    """Begin to load the programs that the last start with these settings of the engine noted, in another thread."""
    _long.clear()
    for name, digest in _noted(settings):
        device = jax.local_devices()[0]
        store = program_store.of_jax(device.client)
        assert store is not None  # that has the note
        beside = later.worker(lasting=False)
        _begun[name, digest] = beside.submit(_loaded, store, name, bytes.fromhex(digest), device)
        beside.shutdown(wait=False)


def end(settings: Any) -> None:
    """Note the programs that took long to load since `begin`, and drop those that it loaded in vain."""
    with _lock:
        _begun.clear()
    calls = _notes()
    key = None if calls is None else start_key(settings)
    if calls is not None and key is not None and _long and _long != _noted(settings):
        calls.put(key, json.dumps(_long).encode())


def _noted(settings: Any) -> list[_Name]:
    """Return the programs that a start with these settings noted."""
    calls = _notes()
    key = None if calls is None else start_key(settings)
    note = None if calls is None or key is None else calls.get(key)
    return [] if note is None else [(name, digest) for name, digest in json.loads(note)]


def _notes() -> ProgramStore | None:
    store = program_store.of_jax(jax.local_devices()[0].client)
    return None if store is None else store.calls()


def _loaded(store: ProgramStore, name: str, digest: bytes, device: Any) -> Any:
    program = store.get(name)
    if program is None or digest_of(program) != digest:
        raise GoneError
    serialized = compilation_cache.decompress_executable(program)
    executable, _ = compilation_cache.extract_executable_and_time(serialized)
    return device.client.deserialize_executable(executable, executable_devices=(device,))
