"""Loads compiled programs without tracing: stores their call signatures beside JAX's persistent cache.

JAX's cache key is the lowered module, and tracing and lowering take longer than loading the program. So the call
signature (structure, shapes and placements of arguments and results, and donation) is stored under a key of everything
that the program is compiled from (`program_key`), with the name and digest of the program, which stays in JAX's cache
(`program_store`). Entries are read by Python's pickle, which executes what it reads, so the folder and its entries must
belong to the user and be writable by no other user.
"""

import dataclasses
import io
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib import xla_client

from et_jax.decode.decoder import Decoder, Program
from et_jax.scope import within
from et_jax.serve.programs import compilation, preload
from et_jax.serve.programs import store as program_store
from et_jax.serve.programs.key import config_text, device_of, program_key, settings
from et_jax.serve.programs.store import ProgramStore

_LOG = logging.getLogger(__name__)


def cached(bound: Decoder) -> Decoder:
    """Return a decoder whose programs are stored with their call signatures.

    Programs of a configuration without a unique key, such as one with a caller's own law, are unchanged.
    """
    text = config_text(bound.config)
    if text is None:
        return bound
    programs = {field.name: getattr(bound, field.name) for field in dataclasses.fields(bound)}
    made = {name: CachedProgram(one, name, text) for name, one in programs.items() if isinstance(one, Program)}
    variants = {
        variant: CachedProgram(one, f"decode {variant}", text) if isinstance(one, Program) else one
        for variant, one in bound.variants.items()
    }
    return dataclasses.replace(bound, **made, variants=variants)


class CachedProgram(Program):
    """A program that is loaded without tracing if an earlier process has stored it; otherwise compiled and stored.

    Arguments are arrays on the same device, and numpy values. With other arguments, within transformations of JAX, or
    if JAX's cache is not a `ProgramStore`, it calls the original program. `seconds` is the compilation time, None until
    the program is loaded or compiled.
    """

    def __init__(self, program: Program, name: str, config: str) -> None:
        super().__init__(program.jitted)
        self._name, self._config = name, config
        self.seconds: float | None = None
        self._ready: dict[str, jax.stages.Compiled] = {}  # by key
        self._lock = threading.Lock()
        self._want, self._make = within(self._wanted), within(self._made)
        self._run = within(lambda compiled, *arguments: compiled(*arguments))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named:
            return super().__call__(*arguments, **named)
        for compiled in tuple(self._ready.values()):
            try:
                return self._run(compiled, *arguments)
            except (TypeError, ValueError):  # compiled for other arguments; raised before it runs
                continue
        wanted = self._want(arguments)
        if wanted is None:
            return super().__call__(*arguments)
        return self._run(self._make(wanted, arguments), *arguments)

    @property
    def ready(self) -> bool:
        """Whether it was loaded or compiled in this process."""
        return bool(self._ready)

    def ahead(self, *arguments: Any) -> Callable[[], object]:
        """Return a function that compiles the program for such arguments in any thread, without their data."""
        wanted = self._want(arguments)
        if wanted is None:
            return lambda: None
        current, described = within(settings)(), jax.tree.map(_described, arguments)

        def make() -> None:
            if within(settings)() == current:  # else this thread would compile a different program
                self._make(wanted, described)

        return make

    def is_cached(self, *arguments: Any) -> bool:
        """Return whether an earlier process has stored the program for such arguments."""
        wanted = self._want(arguments)
        calls = None if wanted is None else wanted.store.calls()
        return wanted is not None and calls is not None and calls.get(wanted.key) is not None

    def _wanted(self, arguments: tuple[Any, ...]) -> "_Wanted | None":
        """Return the key of the program for such arguments; None if it cannot be stored."""
        leaves, structure = jax.tree.flatten((arguments, {}))
        device = device_of(leaves)
        store = None if device is None else program_store.of_jax(device.client)
        if store is None:
            return None
        key = program_key(self._name, self._config, structure, leaves, device)
        return None if key is None else _Wanted(key=key, structure=structure, device=device, store=store)

    def _made(self, wanted: "_Wanted", arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """Return the program, loaded or compiled."""
        with self._lock:
            if wanted.key in self._ready:  # by another thread
                return self._ready[wanted.key]
            calls = wanted.store.calls()
            found = None if calls is None else _loaded(calls, wanted)
            if found is None:
                began = time.monotonic()
                with wanted.store.asked() as names:
                    compiled = self.jitted.lower(*arguments).compile()
                found = compiled, time.monotonic() - began
                if calls is not None:
                    _store_call(calls, wanted, *found, names)
            compiled, self.seconds = found
            self._ready = {wanted.key: compiled} | self._ready
        return compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A program's key, the structure of its arguments, their device, and JAX's cache."""

    key: str
    structure: Any
    device: Any
    store: ProgramStore


def _described(leaf: Any) -> Any:
    """Return the properties of an argument that a program is compiled for."""
    if not isinstance(leaf, jax.Array):
        return leaf
    place = getattr(leaf, "format") if leaf.committed else None  # noqa: B009 - the declared type of an array lacks it
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=leaf.weak_type)


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Writes a program's call signature, and a reference to the program itself."""

    def __init__(self, file: io.BytesIO, name: str, digest: bytes) -> None:
        super().__init__(file)
        self._place = name, digest

    def persistent_id(self, obj: Any) -> Any:
        return ("program", *self._place) if isinstance(obj, xla_client.LoadedExecutable) else super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Reads what `_Pickler` wrote, and loads the program."""

    def __init__(self, file: io.BytesIO, store: ProgramStore, device: Any) -> None:
        super().__init__(file, device.client, (device,))
        self._store = store

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "program":
            return super().persistent_load(pid)
        _, name, digest = pid
        [device] = self.execution_devices
        return preload.load(self._store, name, digest, device)


def _store_call(calls: ProgramStore, wanted: _Wanted, compiled: Any, seconds: float, names: list[str]) -> None:
    """Store the call signature of a program, which JAX requested from its cache by the last of these names.

    The compilation time is stored with it.
    """
    program = wanted.store.get(names[-1]) if names else None
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if program is None or unloaded is None or compiled._params.const_args or unloaded.host_callbacks:
        return  # a program that JAX does not cache, or with constants or host callbacks
    information = jax.tree.leaves(compiled.args_info)
    digest = preload.digest_of(program)
    preload.count_used(names[-1], digest, len(program))
    with io.BytesIO() as file:
        _Pickler(file, names[-1], digest).dump((unloaded, information, compiled.out_tree, seconds))
        calls.put(wanted.key, file.getvalue())


def _loaded(calls: ProgramStore, wanted: _Wanted) -> tuple[jax.stages.Compiled, float] | None:
    """Return the stored program of a key, and its compilation time in seconds.

    Returns None if there is none, or it cannot be loaded.
    """
    began = time.monotonic()
    entry = calls.get(wanted.key)
    if entry is None:
        return None
    try:
        unloaded, information, results, seconds = _Unpickler(io.BytesIO(entry), wanted.store, wanted.device).load()
        loaded = jax.stages.Compiled(unloaded.load(), [], wanted.structure.unflatten(information), results)
    except preload.GoneError:
        return None
    except Exception as error:  # pickle and the device's runtime may raise anything
        _LOG.warning(f"A cached program cannot be loaded ({type(error).__name__}: {error}); it is compiled anew.")
        return None
    compilation.count_loaded(time.monotonic() - began)
    return loaded, seconds
