"""The backends and the devices they support: one table, read by every kernel's `api.py`.

A new backend is a new row here and an entry in the `BACKENDS` of each kernel that has it.
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection
from typing import Any, Protocol, runtime_checkable

import jax

NAMES = ("reference", "xla", "gpu", "tpu")
ABSENT_CAPABILITIES = {"H100": "9.0", "H200": "9.0", "GH200": "9.0"}  # by the last word of the name of an absent GPU
GPU_RUNTIMES = ("cuda", "rocm")  # the names of the platform "gpu" when tracing for an absent one


@runtime_checkable
class Device(Protocol):
    """What the table reads of a `jax.Device`, and its `compute_capability` if it has one."""

    platform: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One row of the table.

    platforms: where it runs, as `jax.default_backend()` names them.
    capabilities: the compute capabilities it supports there, empty for all of them.
    automatic: whether `pick` may select it; False if it runs only when requested by name.
    """

    name: str
    platforms: tuple[str, ...]
    capabilities: tuple[str, ...] = ()
    automatic: bool = True

    def supports(self, platform: str, capability: str | None) -> bool:
        """Return whether it runs on this platform and, if it matters, at this compute capability."""
        return platform in self.platforms and (not self.capabilities or capability in self.capabilities)


# In order of preference: `pick` takes the first that is supported.
TABLE = (
    Backend(name="tpu", platforms=("tpu",)),
    Backend(name="gpu", platforms=("gpu",), capabilities=("9.0",)),
    Backend(name="xla", platforms=("cpu", "gpu", "tpu")),
    Backend(name="reference", platforms=("cpu", "gpu", "tpu"), automatic=False),
)


def kernel(op: str, backend: str, function: str | None = None) -> Callable[..., Any]:
    """Return an op's kernel for a backend, imported on first use: Mosaic takes a quarter of a second to import.

    function: its name in the backend's module; None is the op's own.
    """

    def run(*arrays: Any, **settings: Any) -> Any:
        module = importlib.import_module(f"et_jax.pallas.{op}.{backend}")
        return getattr(module, function or op)(*arrays, **settings)

    return run


def pick(device: str | Device | None = None, built: Collection[str] = NAMES) -> str:
    """Return the best backend among `built` for a device, a platform's name, or None for the traced device.

    The traced device is that of the abstract mesh in use, if a program is traced for an absent chip, or
    else the default device. A platform's name has no compute capability, so no backend that requires
    one is selected for it; an absent GPU has the capability that its name implies.
    """
    platform, capability = _describe(device)
    for row in TABLE:
        if row.automatic and row.name in built and row.supports(platform, capability):
            return row.name
    raise NotImplementedError(f'platform "{platform}" has no backend among {_listed(built)}: use "cpu", "gpu" or "tpu"')


def resolve(backend: str | None, built: Collection[str], device: str | Device | None = None) -> str:
    """Return the backend requested by name, or the result of `pick` for None.

    Raises ValueError for an unknown name, and NotImplementedError for an unsupported backend, with
    the reason and a supported one: there is no silent fallback.
    """
    if backend is None:
        return pick(device, built)
    if backend not in NAMES:
        raise ValueError(f'backend: got "{backend}", wanted one of {_listed(NAMES)} or None')
    row = next((row for row in TABLE if row.name == backend), None)
    if row is None or backend not in built:
        raise NotImplementedError(f'backend "{backend}" has no kernel for this: use "{pick(device, built)}"')
    platform, capability = _describe(device)
    if not row.supports(platform, capability):
        found = platform if capability is None else f"{platform} of compute capability {capability}"
        wanted = f"{'/'.join(row.platforms)} {'/'.join(row.capabilities)}".rstrip()
        raise NotImplementedError(f'backend "{backend}" supports {wanted}, not {found}: use "{pick(device, built)}"')
    return backend


def platform(device: str | Device | None = None) -> str:
    """Return "cpu", "gpu" or "tpu": the platform of a device, or for None of the traced one."""
    return _describe(device)[0]


def device_kind() -> str:
    """Return the kind of the traced device, as JAX names it: "cpu", "TPU v5 lite", "NVIDIA H200"."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if absent is None else absent.device_kind


def _describe(device: str | Device | None) -> tuple[str, str | None]:
    if isinstance(device, str):
        return device, None
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and absent is not None:
        capability = ABSENT_CAPABILITIES.get(absent.device_kind.split()[-1])
        return "gpu" if absent.platform in GPU_RUNTIMES else absent.platform, capability
    device = jax.local_devices()[0] if device is None else device
    return device.platform, getattr(device, "compute_capability", None)


def _listed(names: Collection[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
