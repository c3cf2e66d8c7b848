"""What a compiled program is told by: a digest of all that it was made from, None where that cannot be known.

That is the package's sources, the versions of Python, JAX and its compiler, the processor or chip with what it can do,
every setting of JAX, the decoder's configuration, and the structure, shapes, dtypes and layouts of the arguments.
Values are written down part by part. A function, or a type, is told by its name where the package or JAX has it under
that name: its code is told by the sources, and by the versions. One that a caller wrote has no such name, so that what
is made with it is not known.
"""

import dataclasses
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxlib import version, xla_client

from et_jax.decode.config import DecoderConfig
from et_jax.io import own_sources

_KNOWN = frozenset({"et_jax", "jax", "jaxlib", "ml_dtypes", "numpy", "builtins"})  # packages whose versions are told
_PLAIN = (type(None), bool, int, float, str, bytes)


class UnknownError(Exception):
    """A value that cannot be told from every other one."""


def config_told(config: DecoderConfig) -> str | None:
    """Return what a configuration is told by: its fields, but of its controller only the structure.

    None where the package itself was changed since the process began, or a part of the configuration is unknown.
    """
    sources = own_sources.digest()
    if sources is None:
        return None
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    laws = jax.tree.structure(fields.pop("controller"))
    try:
        return repr((sources, _written(fields), _structure(laws)))
    except UnknownError:
        return None


def device_of(leaves: Sequence[Any]) -> Any:
    """Return the one device that arrays among these were put on, None where there is no such one.

    Those that were put nowhere go where the others are.
    """
    found = set()
    for leaf in leaves:
        if isinstance(leaf, Tracer):
            return None
        if isinstance(leaf, jax.Array):
            if not isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
                return None
            if leaf.committed:
                found |= leaf.devices()
    return found.pop() if len(found) == 1 else None


def program_key(name: str, config: str, structure: Any, leaves: Sequence[Any], device: Any) -> str | None:
    """Return the key of a program of this name and configuration, for arguments of a tree on a device.

    `config` is what `config_told` says.
    """
    try:
        arguments = _structure(structure), tuple(map(_shape, leaves))
    except UnknownError:
        return None
    told = repr((name, config, _machine(device), settings(), arguments))
    return f"{name}-{hashlib.blake2b(told.encode(), digest_size=32).hexdigest()}"


@functools.cache
def _machine(device: Any) -> tuple[Any, ...]:
    """The versions of what makes programs, and what the device is and can do."""
    client = device.client
    versions = platform.python_version(), np.__version__, jax.__version__, version.__version__, client.platform_version
    flags = tuple(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    topology = xla_client.get_topology_for_devices([device]).fingerprint()  # a processor's features are in it
    return versions, flags, client.platform, device.device_kind, device.id, len(client.devices()), topology


def settings() -> tuple[str, ...]:
    """Return every setting of JAX, as it is in this thread, but where programs are kept and what guards transfers."""
    known = sorted(jax.config.values.items())  # for the whole process; some are another in a thread, as attributes
    told = [(name, value) for name, value in known if "cache" not in name and "guard" not in name]
    return tuple(f"{name}={getattr(jax.config, name, value)!r}" for name, value in told)


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What a program is compiled for, of one argument."""
    if isinstance(leaf, jax.Array):
        layout = str(getattr(leaf, "format").layout)  # noqa: B009 - which the declared type of an array lacks
        return leaf.shape, leaf.dtype.name, leaf.weak_type, leaf.committed, leaf.sharding.memory_kind, layout
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype.name
    if type(leaf) in (bool, int, float):
        return (type(leaf).__name__,)
    raise UnknownError


def _structure(tree: Any) -> Any:
    """What the structure of a tree is told by."""
    node = tree.node_data()
    if node is None:
        return "leaf"
    kind, fixed = node
    if kind is type(None):
        return "none"
    return _named(kind), _written(fixed), tuple(map(_structure, tree.children()))


def _written(value: Any) -> Any:
    """What a value is told by, part by part, in tuples of plain values.

    Raises UnknownError for what is of a type that others have made, or has parts that cannot be seen.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list):
        return kind.__name__, *map(_written, value)
    if kind in (set, frozenset):
        return kind.__name__, *sorted(repr(_written(one)) for one in value)
    if kind is dict:
        return "dict", *((_written(name), _written(one)) for name, one in value.items())
    if isinstance(value, np.dtype):
        return "dtype", value.name, value.str
    if isinstance(value, np.ndarray | np.generic):
        return "array", value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return _named(value)
    if isinstance(value, functools.partial):
        return "partial", _written(value.func), _written(value.args), _written(value.keywords)
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif kind.__module__.partition(".")[0] == "et_jax" and hasattr(value, "__dict__"):
        parts = vars(value)
    else:
        raise UnknownError
    return _named(kind), _written(dict(parts))


def _named(value: Any) -> tuple[str, str]:
    """The module and the name of a function or a type, which must be found under them."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module.partition(".")[0] not in _KNOWN:
        raise UnknownError
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError) as error:  # within a function, or made as the program runs
        raise UnknownError from error
    if found is not value:
        raise UnknownError
    return module, name
