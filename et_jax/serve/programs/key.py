"""The key of a compiled program: a digest of everything it is compiled from, or None if that is unknown.

The key covers the package's sources, the versions of Python, JAX and its compiler, the processor or chip and its
features, every setting of JAX, the decoder's configuration, and the structure, shapes, dtypes and layouts of the
arguments. Values are serialised part by part. A function or type is identified by its name if the package or JAX
defines that name; the sources and versions identify its code. A caller's own function has no such name, so a program
that uses it has no key.
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

_KNOWN = frozenset({"et_jax", "jax", "jaxlib", "ml_dtypes", "numpy", "builtins"})  # their versions are in the key
_PLAIN = (type(None), bool, int, float, str, bytes)


class UnknownError(Exception):
    """A value without a unique description."""


def config_text(config: DecoderConfig) -> str | None:
    """Return a unique description of a configuration: its fields, but only the structure of its controller.

    None if the package's sources changed since the process began, or a part of the configuration is unknown.
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


def start_key(settings: Any) -> str | None:
    """Return the key of a start with settings of the engine on the first device.

    None if the package's sources changed since the process began, or a part of the settings is unknown.
    """
    sources = own_sources.digest()
    if sources is None:
        return None
    try:
        text = repr((sources, _machine(jax.local_devices()[0]), _written(settings)))
    except UnknownError:
        return None
    return f"start-{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def device_of(leaves: Sequence[Any]) -> Any:
    """Return the device to which all committed arrays among `leaves` are committed, or None.

    Uncommitted arrays follow the others.
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
    """Return the key of a program of this name and configuration, for the arguments of a tree on a device.

    `config` is the result of `config_text`.
    """
    try:
        arguments = _structure(structure), tuple(map(_shape, leaves))
    except UnknownError:
        return None
    text = repr((name, config, _machine(device), settings(), arguments))
    return f"{name}-{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


@functools.cache
def _machine(device: Any) -> tuple[Any, ...]:
    """Return the versions of the compiler and its inputs, and the device's kind and features."""
    client = device.client
    versions = platform.python_version(), np.__version__, jax.__version__, version.__version__, client.platform_version
    flags = tuple(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    topology = xla_client.get_topology_for_devices([device]).fingerprint()  # includes a processor's features
    return versions, flags, client.platform, device.device_kind, device.id, len(client.devices()), topology


def settings() -> tuple[str, ...]:
    """Return every setting of JAX in this thread, except those of caches and transfer guards."""
    known = sorted(jax.config.values.items())  # of the process; as attributes, some differ in a thread
    known = [(name, value) for name, value in known if "cache" not in name and "guard" not in name]
    return tuple(f"{name}={getattr(jax.config, name, value)!r}" for name, value in known)


def _shape(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of an argument that a program is compiled for."""
    if isinstance(leaf, jax.Array):
        layout = str(getattr(leaf, "format").layout)  # noqa: B009 - the declared type of an array lacks it
        return leaf.shape, leaf.dtype.name, leaf.weak_type, leaf.committed, leaf.sharding.memory_kind, layout
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype.name
    if type(leaf) in (bool, int, float):
        return (type(leaf).__name__,)
    raise UnknownError


def _structure(tree: Any) -> Any:
    """Return a unique description of a tree's structure."""
    node = tree.node_data()
    if node is None:
        return "leaf"
    kind, fixed = node
    if kind is type(None):
        return "none"
    return _named(kind), _written(fixed), tuple(map(_structure, tree.children()))


def _written(value: Any) -> Any:
    """Return a unique description of a value, part by part, in tuples of plain values.

    Raises UnknownError for a value of a type from another package, or with parts that cannot be inspected.
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
    """Return the module and the name of a function or a type. Raises UnknownError unless they lead back to it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module.partition(".")[0] not in _KNOWN:
        raise UnknownError
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError) as error:  # defined in a function, or created at run time
        raise UnknownError from error
    if found is not value:
        raise UnknownError
    return module, name
