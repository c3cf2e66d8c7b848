"""Ray itself: whether it is here, which cluster, whether that has room, and what of a machine an actor may use."""

import fcntl
import importlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from et_jax.errors import UsageError
from et_jax.io import values

BESIDE = 2  # logical CPUs that reading and cutting into blocks take, beside those of the actors
_PATIENCE = 5.0  # seconds that a cluster may take to answer
_PLATFORMS = {"GPU": "gpu", "TPU": "tpu"}  # resources in Ray's spelling, and JAX's name of such a device
_SETTINGS = {  # of Ray, where the user has none: no word to anyone outside, nor of what it mends by itself
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

Resources = Mapping[str, float]
"""What one actor holds, in Ray's names: `{"CPU": 4, "GPU": 1}`."""


def ray() -> Any:
    """Return the module `ray`, with `ray.data`. Raises UsageError where it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("ray.data")
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("Ray is not installed; install it with: pip install 'et_jax[ray]'.") from error


def check_resources(given: Any) -> Resources:
    """Return what an actor holds, a CPU by default. Raises UsageError."""
    if not isinstance(given, Mapping):
        raise UsageError(f'resources is {values.shown(given)}; it must be amounts by name, such as {{"CPU": 4}}.')
    checked = {"CPU": 1.0} | {str(name): values.number(f"resources.{name}", amount) for name, amount in given.items()}
    for name, amount in checked.items():
        if not amount >= 0:
            raise UsageError(f"resources.{name} is {amount}; it must be 0 or above.")
    return {name: amount for name, amount in checked.items() if amount}


def platform_of(resources: Resources) -> str:
    """Return the kind of device that an actor decodes on, as JAX names it."""
    return next((platform for name, platform in _PLATFORMS.items() if resources.get(name)), "cpu")


@contextmanager
def connected(address: str | None, *, told: bool) -> Iterator[Any]:
    """Connect to the cluster at `address`, "host:port", or start one on this machine alone; yield the module `ray`.

    With `told` what workers print is shown. Raises UsageError where no cluster answers.
    """
    module = ray()
    logging.getLogger("ray.data").setLevel(logging.INFO if told else logging.ERROR)
    quiet = {"log_to_driver": told, "logging_level": logging.ERROR}
    if address is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        module.init(address="local", num_cpus=cores + BESIDE, include_dashboard=False, **quiet)
    else:
        _check_answers(address)
        try:
            module.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error).strip().partition("\n")[0]
            raise UsageError(f"The Ray cluster at {address} cannot be joined ({said}); {_ADVICE}.") from error
    try:
        yield module
    finally:
        module.shutdown()


_ADVICE = "see with `ray status` whether it runs, and give --ray-address its host:port"


def _check_answers(address: str) -> None:
    """Find out that something listens at an address; Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError(f"--ray-address is {address}; it must be the host:port of a cluster's head.")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(f"No Ray cluster answers at {address} ({said}); {_ADVICE}.") from error


def check_room(module: Any, actors: int, resources: Resources) -> None:
    """Find out that the cluster can hold so many actors and read beside them, for which Ray would wait for ever.

    Raises UsageError.
    """
    nodes = [node["Resources"] for node in module.nodes() if node["Alive"]]
    room = sum(int(min(node.get(name, 0.0) // amount for name, amount in resources.items())) for node in nodes)
    room = min(room, int((sum(node.get("CPU", 0.0) for node in nodes) - BESIDE) // resources.get("CPU", 1e-9)))
    if room < actors:
        each = ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
        start = "{} asks for {} actors of {}, and the cluster has room for {} and the reading beside; ask for less, or {}."
        advice = "start Ray with more, as ray.init(num_cpus=...), or add nodes"
        raise UsageError(
            start.format("concurrency", actors, each, max(room, 0), advice),
            on_command_line=start.format("--ray-actors", actors, each, max(room, 0), "add nodes"),
        )


def settle(resources: Resources) -> None:
    """Have this process, an actor that holds `resources`, decode on them alone; before it asks JAX for a device.

    Without an accelerator it is bound to cores of its own, by whose number JAX sizes its threads.
    """
    platform = platform_of(resources)
    jax.config.update("jax_platforms", {"gpu": "cuda,rocm"}.get(platform, platform))
    if platform == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = own_cores(max(1, int(resources.get("CPU", 1))), Path(tempfile.gettempdir()))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def own_cores(count: int, folder: Path) -> list[int]:
    """Return `count` cores of this machine: such as no other actor holds, as long as there are any.

    They are held by locks on files in `folder`, until the process ends, in whatever way.
    """
    free, shared = [], []
    for core in sorted(os.sched_getaffinity(0)):
        file = os.open(folder / f"et_jax-core-{os.getuid()}-{core}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            shared.append(core)
            continue
        free.append(core)
        if len(free) == count:
            break
    return (free + shared)[:count]
