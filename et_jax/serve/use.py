"""Checks that a model may be used: open, in the process that loaded it, and outside of JAX tracing."""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir

from et_jax.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


_probe = Primitive("traced")
"""An operation without operands that touches no device: JAX runs it, or traces it."""
_probe.def_impl(lambda: None)
_probe.def_abstract_eval(lambda: ShapedArray((), np.int32))
mlir.register_lowering(
    _probe, mlir.lower_fun(lambda: np.int32(0), multiple_results=False)
)  # a shard_map's trace runs it


class Use:
    """Whether the model `name` may be used: it is open, and this is the process that loaded it.

    Checking and closing take no lock, so that a finaliser may close.
    """

    def __init__(self, name: str) -> None:
        self._name, self._process = name, os.getpid()
        self.closed = False

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a fork of the one that loaded the model: without its threads, with its locks."""
        return os.getpid() != self._process

    @property
    def refusal(self) -> UsageError:
        """The error for a model that is closed."""
        return UsageError(f"The model {self._name} is closed; load it anew.")

    def check(self) -> None:
        """Raise UsageError if the model is closed, or was loaded before this process was forked."""
        if self.closed:
            raise self.refusal
        if self.elsewhere:
            raise UsageError(
                f"The model {self._name} was loaded before this process was forked, and its threads are not here; load "
                'it in each process, or start processes by multiprocessing.get_context("spawn").'
            )


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that first runs `check_untraced`, before it changes any setting of JAX."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_untraced()
        return function(*args, **kwargs)

    return checked


def check_untraced() -> None:
    """Raise UsageError while JAX traces the calling code, so that arrays have no values yet.

    Under `jax.grad` and `jax.vmap` without a trace JAX still runs operations that do not depend on their inputs.
    """
    if isinstance(_probe.bind(), Tracer):
        raise UsageError(
            "A model cannot be loaded or used within a function that JAX traces (jit, checkpoint, scan, shard_map), "
            "where no array holds numbers yet; do it outside."
        )
