"""Compiled programs: kept between runs, and counted."""

import functools
import tempfile
from pathlib import Path

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's name for a program built, or read from its cache


def keep_programs(folder: Path) -> str | None:
    """Keep compiled programs between runs, unless the caller has chosen a folder already.

    Returns None, or why `folder` cannot be used.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return None
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"room")
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name that is none
        return f"which cannot be written ({getattr(error, 'strerror', None) or error})"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None


def num_compiled() -> int:
    """Return how many programs this process has compiled, or read from the kept ones, since the first call."""
    return len(_compilations())


@functools.cache
def _compilations() -> list[float]:
    """Seconds per program, as JAX reports them."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == _COMPILED:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
