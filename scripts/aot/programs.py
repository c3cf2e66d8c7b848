"""A program before it is compiled for a chip that is absent: what is asked of it, and how it is traced for the chip."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from aot.chips import Chip
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowering:
    """A program about to be compiled, the bytes of its page pool, and what is asked of it.

    pool: every array that has an entry for each page, by name; none may be copied whole.
    temporary_bound: bytes its temporaries must stay under. in_place: whether it must write the pool where it lies.
    on_chip: what it takes of the chip's own memories, by the kernel's count, or what the chip holds of a model that is
        split. memory: bytes that the chip has, for arguments, outputs and temporaries.
    collectives: the collectives that its text must have, as they are reported; small ones are not counted.
    kernels, step_kernels: that a layer and a step may launch (`aot.launches`); None where none are counted.
    control: how many of these may be loops or conditionals.
    """

    lower: Callable[[], Any]
    pool_bytes: int
    pool: dict[str, Any]
    temporary_bound: float
    in_place: bool
    on_chip: str = ""
    memory: float = math.inf
    collectives: str = ""
    kernels: int | None = None
    step_kernels: int | None = None
    control: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One line of the report. `build` traces nothing yet; one that is not `usual` is compiled only with all."""

    name: str
    chip: str
    build: Callable[[], Lowering]
    usual: bool = True


def device_of(chip: Chip) -> Any:
    """Return the chip as a device that can be compiled for."""
    return topologies.get_topology_desc(**chip.topology).devices[0]


def on_device(leaf: Any, device: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array that lies on the device."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def by_path(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def lower_for(device: Any, jitted: Any, *arguments: Any) -> Any:
    """Return the program traced as for the device."""
    with traced_for(device):
        return jitted.lower(*arguments)


def traced_for(device: Any) -> AbstractContextManager[Any]:
    """Return within what things are traced as for the device, which is how the kernels know what chip they are for."""
    platform = "cuda" if device.platform == "gpu" else device.platform  # as JAX names it while tracing
    kind = jax.sharding.AbstractDevice(device.device_kind, 1, platform)
    auto = (jax.sharding.AxisType.Auto,)  # nothing is divided: where an axis is explicit, ragged products want it said
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), auto, abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)
