"""Programs that are called without being traced: what it takes to call them is kept beside what JAX keeps of them.

JAX finds a compiled program by the module that tracing and lowering give, which takes longer than loading it does. So
how a program is called (the structure of arguments and results, their shapes and places, which are donated) is kept
under a key of all that it was made from (`program_key`), with the name and the digest of the program itself, which is
where JAX keeps it (`program_store`). What is kept so is read by Python's pickle, which runs what it reads: the folder
and its entries must be the user's own, and writable by nobody else.
"""

import dataclasses
import hashlib
import io
import logging
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax.experimental import serialize_executable
from jaxlib import xla_client

from et_jax.decode.decoder import Decoder, Program
from et_jax.scope import within
from et_jax.serve.programs import compilation
from et_jax.serve.programs.key import config_told, device_of, program_key, settings
from et_jax.serve.programs.store import ProgramStore, not_own

_LOG = logging.getLogger(__name__)
_FOLDER = "calls"  # in that of the programs


def kept(bound: Decoder) -> Decoder:
    """Return a decoder whose programs are kept with what it takes to call them.

    Those of a configuration that cannot be told from others, such as one with a law of the caller's own, are as they
    were.
    """
    told = config_told(bound.config)
    if told is None:
        return bound
    programs = {field.name: getattr(bound, field.name) for field in dataclasses.fields(bound)}
    made = {name: Kept(one, name, told) for name, one in programs.items() if isinstance(one, Program)}
    variants = {
        variant: Kept(one, f"decode {variant}", told) if isinstance(one, Program) else one
        for variant, one in bound.variants.items()
    }
    return dataclasses.replace(bound, **made, variants=variants)


class Kept(Program):
    """A program that is loaded, not traced, where a process before this one has kept it; else it is kept.

    Arguments are arrays that were put on one device, and values of numpy. With others, within transformations of JAX,
    and where JAX keeps programs in no `ProgramStore`, it is the program that it was. `seconds` is what it took to make,
    when that was done; None before.
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
            except (TypeError, ValueError):  # made for other arguments, as it says before it runs
                continue
        wanted = self._want(arguments)
        if wanted is None:
            return super().__call__(*arguments)
        return self._run(self._make(wanted, arguments), *arguments)

    @property
    def ready(self) -> bool:
        """Whether one was made in this process."""
        return bool(self._ready)

    def ahead(self, *arguments: Any) -> Callable[[], object]:
        """Return what makes the program for such arguments in any thread, and holds none of their data."""
        wanted = self._want(arguments)
        if wanted is None:
            return lambda: None
        told, described = within(settings)(), jax.tree.map(_described, arguments)

        def make() -> None:
            if within(settings)() == told:  # else this thread would make another
                self._make(wanted, described)

        return make

    def is_kept(self, *arguments: Any) -> bool:
        """Return whether a process before this one has kept the program for such arguments."""
        wanted = self._want(arguments)
        calls = None if wanted is None else _own(wanted.store.folder / _FOLDER)
        return wanted is not None and calls is not None and calls.get(wanted.key) is not None

    def _wanted(self, arguments: tuple[Any, ...]) -> "_Wanted | None":
        """What program such arguments want; None where it cannot be kept."""
        leaves, structure = jax.tree.flatten((arguments, {}))
        device = device_of(leaves)
        store = None if device is None else _store(device.client)
        if store is None:
            return None
        key = program_key(self._name, self._config, structure, leaves, device)
        return None if key is None else _Wanted(key=key, structure=structure, device=device, store=store)

    def _made(self, wanted: "_Wanted", arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """The program that is wanted, loaded or compiled."""
        with self._lock:
            if wanted.key in self._ready:  # by another thread
                return self._ready[wanted.key]
            calls = _own(wanted.store.folder / _FOLDER)
            found = None if calls is None else _loaded(calls, wanted)
            if found is None:
                began = time.monotonic()
                with wanted.store.asked() as names:
                    compiled = self.jitted.lower(*arguments).compile()
                found = compiled, time.monotonic() - began
                if calls is not None:
                    _keep(calls, wanted, *found, names)
            compiled, self.seconds = found
            self._ready = {wanted.key: compiled} | self._ready
        return compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A program by its key, for arguments of a structure on a device, and where JAX keeps it."""

    key: str
    structure: Any
    device: Any
    store: ProgramStore


def _described(leaf: Any) -> Any:
    """What a program is made for, of one argument."""
    if not isinstance(leaf, jax.Array):
        return leaf
    place = getattr(leaf, "format") if leaf.committed else None  # noqa: B009 - the declared type of an array lacks it
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=leaf.weak_type)


def _store(backend: Any) -> ProgramStore | None:
    """Where JAX keeps programs, if that is a store of the package's own."""
    found = compilation_cache._get_cache(backend) if compilation_cache.is_cache_used(backend) else None
    return found if isinstance(found, ProgramStore) else None


def _own(folder: Path) -> ProgramStore | None:
    """A store in a folder that is the user's own, None where it cannot be."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = not_own(folder.lstat(), stat.S_ISDIR)
    except OSError as error:
        reason = str(error.strerror or error)
    if reason is None:
        return ProgramStore(folder, own=True)
    _LOG.warning(f"Programs are traced at every start, for {folder} cannot be used ({reason}); remove it.")
    return None


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Writes how a program is called, and the place of the program itself."""

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
        program = self._store.get(name)
        if program is None or _digest(program) != digest:
            raise _GoneError
        whole = compilation_cache.decompress_executable(program)
        executable, _ = compilation_cache.extract_executable_and_time(whole)
        return self.backend.deserialize_executable(executable, executable_devices=self.execution_devices)


class _GoneError(Exception):
    """The program itself is kept no more, or was compiled anew since."""


def _digest(program: bytes) -> bytes:
    return hashlib.blake2b(program, digest_size=32).digest()


def _keep(calls: ProgramStore, wanted: _Wanted, compiled: Any, seconds: float, names: list[str]) -> None:
    """Keep what it takes to call a program, which JAX asked the store for by the last of these names.

    Beside it is kept how many seconds it took to make.
    """
    program = wanted.store.get(names[-1]) if names else None
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if program is None or unloaded is None or compiled._params.const_args or unloaded.host_callbacks:
        return  # a program that JAX keeps nowhere, or one with more to it than arguments and results
    information = jax.tree.leaves(compiled.args_info)
    with io.BytesIO() as file:
        _Pickler(file, names[-1], _digest(program)).dump((unloaded, information, compiled.out_tree, seconds))
        calls.put(wanted.key, file.getvalue())


def _loaded(calls: ProgramStore, wanted: _Wanted) -> tuple[jax.stages.Compiled, float] | None:
    """The program that was kept under a key, and the seconds that it took to make, when it was made.

    None where there is none, or none that can be loaded.
    """
    began = time.monotonic()
    entry = calls.get(wanted.key)
    if entry is None:
        return None
    try:
        unloaded, information, results, seconds = _Unpickler(io.BytesIO(entry), wanted.store, wanted.device).load()
        loaded = jax.stages.Compiled(unloaded.load(), [], wanted.structure.unflatten(information), results)
    except _GoneError:
        return None
    except Exception as error:  # whatever pickle, or the device's runtime, says of what it cannot read
        _LOG.warning(f"A kept program cannot be loaded ({type(error).__name__}: {error}); it is compiled anew.")
        return None
    compilation.count_loaded(time.monotonic() - began)
    return loaded, seconds
