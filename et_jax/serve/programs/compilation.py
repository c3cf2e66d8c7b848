"""The persistent compile cache, with counts and times of compilations."""

import dataclasses
import functools
import tempfile
import threading
import time
from pathlib import Path

import jax

from et_jax.io.files import cache_folder, expanded
from et_jax.serve.programs import store as program_store

# JAX's event names; the third covers both a compilation and a load from the cache.
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BUILT = "/jax/core/compile/backend_compile_duration"
_LOADED = "/jax/compilation_cache/cache_retrieval_time_sec"


def cache_programs(folder: Path) -> str | None:
    """Use a folder as JAX's persistent cache, unless the caller has configured one already.

    Returns None, or the reason why `folder` cannot be used. Raises UsageError if its home directory does not exist.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return None
    folder = expanded(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"room")
    except (OSError, RuntimeError, ValueError) as error:  # no such home, an invalid name
        return f"which cannot be written ({getattr(error, 'strerror', None) or error})"
    program_store.use(folder)
    return None


def default_folder() -> Path:
    """Return the default folder of compiled programs. Raises UsageError if there is no home directory."""
    return cache_folder() / "programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """How many programs were compiled or loaded, and the seconds of tracing (and lowering), compiling and loading."""

    programs: int
    tracing: float
    compiling: float
    loading: float

    def __sub__(self, before: "Made") -> "Made":
        """Return the difference to an earlier count."""
        fields = (field.name for field in dataclasses.fields(self))
        return Made(**{name: getattr(self, name) - getattr(before, name) for name in fields})

    def __str__(self) -> str:
        """Return the counts as a sentence."""
        spent = ("tracing", self.tracing), ("compiling", self.compiling), ("loading", self.loading)
        seconds = ", ".join(f"{took:.1f} s {name}" for name, took in spent)
        return f"{self.programs} programs ready: {seconds}."


def made() -> Made:
    """Return the counts of this process since the first call."""
    seconds = _listened()
    return Made(
        programs=len(seconds[_BUILT]),
        tracing=sum(seconds[_TRACED] + seconds[_LOWERED], 0.0),
        compiling=sum(seconds[_BUILT], 0.0) - sum(seconds[_LOADED]),
        loading=sum(seconds[_LOADED], 0.0),
    )


def count_loaded(seconds: float) -> None:
    """Count a program that was loaded without JAX in `seconds`."""
    for name in (_BUILT, _LOADED):
        _listened()[name].append(seconds)


@functools.cache
def _listened() -> dict[str, list[float]]:
    """Return seconds by JAX's event names, an entry per event; nested traces are subtracted from the outer trace."""
    seconds: dict[str, list[float]] = {name: [] for name in (_TRACED, _LOWERED, _BUILT, _LOADED)}
    ended = threading.local()

    def listen(event: str, duration: float, **_: object) -> None:
        if event == _TRACED:
            total, start = duration, time.monotonic() - duration
            traces = vars(ended).setdefault("traces", [])  # of this thread: when each began, and what it took
            while traces and traces[-1][0] >= start:
                duration -= traces.pop()[1]
            traces.append((start, total))
        if event in seconds:
            seconds[event].append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
