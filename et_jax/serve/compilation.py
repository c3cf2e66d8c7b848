"""Compiled programs: kept between runs, and counted."""

import functools
import os
import tempfile
from pathlib import Path

import jax

from et_jax.io.files import expanded
from et_jax.serve import program_store

_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's name for a program built, or read from its cache


def keep_programs(folder: Path) -> str | None:
    """Keep compiled programs between runs, unless the caller has chosen a folder already.

    Returns None, or why `folder` cannot be used. Raises UsageError where it begins with a home that is none.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return None
    folder = expanded(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"room")
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name that is none
        return f"which cannot be written ({getattr(error, 'strerror', None) or error})"
    program_store.use(folder)
    return None


def default_folder() -> Path:
    """Return where programs are kept unless the caller says otherwise: in the user's folder of what can be made anew.

    That is XDG_CACHE_HOME, where it is an absolute path, or ~/.cache. Raises UsageError where there is no home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else expanded("~/.cache")) / "et_jax/programs"


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
