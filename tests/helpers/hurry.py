"""Compiling in a hurry: for programs that take longer to compile well than to run."""

import contextlib
import os
from collections.abc import Iterator

import jax

NAME = "jax_disable_most_optimizations"


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Compile with few optimisations, here and in commands."""
    before = os.environ.get(NAME.upper())
    jax.config.update(NAME, True)
    os.environ[NAME.upper()] = "1"
    yield
    if before is None:
        del os.environ[NAME.upper()]
        jax.config.update(NAME, False)
