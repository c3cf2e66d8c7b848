"""The package's own settings of JAX, whatever the program around it, or the environment, has set.

JAX has switches that change what any program computes, or whether it may: 64-bit numbers, strict promotion, a search
for NaN, guards of transfers. They are a process's. Work of this package, which makes infinities on purpose and copies
what it needs, is done with JAX's defaults in the current thread alone, so that a text does not depend on them and the
programs compiled for it are found again after a switch was turned.
"""

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from et_jax.errors import UsageError

R = TypeVar("R")

SETTINGS: dict[str, Any] = {
    # what a program computes
    "enable_x64": False,
    "default_matmul_precision": None,
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,
    "softmax_custom_jvp": False,
    # what it may do
    "numpy_rank_promotion": "allow",
    "numpy_dtype_promotion": "standard",
    "allow_f16_reductions": True,
    "legacy_prng_key": "allow",
    "debug_key_reuse": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
    "array_garbage_collection_guard": "allow",
    "no_tracing": False,
    "no_execution": False,
    # how it is run
    "disable_jit": False,
    "debug_nans": False,
    "debug_infs": False,
    "check_tracer_leaks": False,
    "enable_checks": False,
}
"""Context managers of `jax`, each for the current thread, and their values."""


_now = operator.attrgetter(*(f"jax_{name}" for name in SETTINGS))


class _Here(threading.local):
    """Whether this thread is within the settings."""

    inside = False


_here = _Here()


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Use the package's settings of JAX in this thread, and no mesh; also a decorator. Within itself it does nothing.

    Raises UsageError within `jax.grad` or `jax.vmap` under a mesh, which JAX takes away from neither.
    """
    if _here.inside:
        yield
    else:
        with _no_mesh(), _settings():
            yield


def _no_mesh() -> contextlib.AbstractContextManager[Any]:
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError as error:
        raise UsageError(
            "A model cannot be loaded or used within jax.grad or jax.vmap under a mesh (jax.set_mesh); do it outside."
        ) from error


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in SETTINGS.items():
            stack.enter_context(getattr(jax, name)(value))
        _here.inside = True
        try:
            yield
        finally:
            _here.inside = False


def within(function: Callable[..., R]) -> Callable[..., R]:
    """Return a function that is called within the settings, which costs next to nothing where they hold already."""

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> R:
        if _here.inside or _hold():
            return function(*arguments, **named)
        with _settings():
            return function(*arguments, **named)

    return called


def _hold() -> bool:
    """Whether this thread has all of the settings as it is, with guards that were never set."""
    return _now(jax.config) == tuple(None if "guard" in name else value for name, value in SETTINGS.items())


def platform() -> str:
    """Return the platform that JAX runs on, as `jax.default_backend` names it.

    Raises UsageError where JAX finds no device.
    """
    try:
        return jax.default_backend()
    except (AssertionError, RuntimeError) as error:  # a platform without a device, and one of an unknown name
        asked = jax.config.jax_platforms
        if asked:
            raise UsageError(
                f"JAX finds no device of the platform that JAX_PLATFORMS asks for, {asked}; unset it, or name one that "
                "is here, such as cpu."
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"JAX finds no device ({reason}); mend that, or set JAX_PLATFORMS=cpu.") from error
