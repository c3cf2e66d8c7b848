"""Ray itself: whether it is installed, which cluster, its room for actors, and the cores that an actor may use."""

import fcntl
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.scope import platform

BESIDE = 2  # logical CPUs that reading and cutting into blocks take, beside those of the actors
_PATIENCE = 30.0  # seconds that a cluster may take to answer
_PLATFORMS = {"GPU": "gpu", "TPU": "tpu"}  # resources in Ray's spelling, and JAX's name of such a device
_SETTINGS = {  # of Ray, where the user has none: no word to anyone outside, nor of what it mends by itself
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

Resources = Mapping[str, float]
"""The resources of an actor, by Ray's names: `{"CPU": 4, "GPU": 1}`."""


def ray() -> Any:
    """Return the module `ray`, with `ray.data`. Raises UsageError if it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("ray.data")
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("Ray is not installed; install it with: pip install 'et_jax[ray]'.") from error


def check_resources(given: Any) -> Resources:
    """Return the resources of an actor, by default a CPU. Raises UsageError."""
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
def connected(address: str | None, *, verbose: bool) -> Iterator[Any]:
    """Connect to the cluster at `address`, "host:port", or start one on this machine alone; yield the module `ray`.

    With `verbose` the output of workers is shown. Raises UsageError if no cluster answers.
    """
    module = ray()
    logging.getLogger("ray.data").setLevel(logging.INFO if verbose else logging.ERROR)
    quiet = {"log_to_driver": verbose, "logging_level": logging.ERROR}
    handler = signal.getsignal(signal.SIGTERM)
    if address is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        module.init(address="local", num_cpus=cores + BESIDE, include_dashboard=False, **quiet)
    else:
        _check_joins(address)
        module.init(address=address, **quiet)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # in the place of Ray's, which prints a stack
    try:
        yield module
    finally:
        module.shutdown()


_JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
_ADVICE = "see with `ray status` whether it runs, and give --ray-address its host:port"


def _check_joins(address: str) -> None:
    """Check in a separate process with a time limit that a cluster can be joined; Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError(f"--ray-address is {address}; it must be the host:port of a cluster's head.")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
        subprocess.run([sys.executable, "-c", _JOIN, address], timeout=_PATIENCE, check=True, capture_output=True)
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(f"No Ray cluster answers at {address} ({said}); {_ADVICE}.") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"What listens at {address} does not answer as a Ray cluster does; {_ADVICE}.") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        if "AuthToken" in said:
            raise UsageError(f"The Ray cluster at {address} asks for a token; set RAY_AUTH_MODE=token.") from error
        said = said.rpartition("\n")[2][:200]
        raise UsageError(f"The Ray cluster at {address} cannot be joined ({said}); {_ADVICE}.") from error


def check_room(module: Any, actors: int, resources: Resources) -> None:
    """Raise UsageError unless the cluster has room for so many actors and for reading; Ray would wait without end."""
    nodes = [node["Resources"] for node in module.nodes() if node["Alive"]]
    room = sum(int(min(node.get(name, 0.0) // amount for name, amount in resources.items())) for node in nodes)
    room = min(room, int((sum(node.get("CPU", 0.0) for node in nodes) - BESIDE) // resources.get("CPU", 1e-9)))
    if room < actors:
        each = ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
        said = f"{actors} actors of {each}, and besides reading there is room for {max(room, 0)}; ask for less, or"
        raise UsageError(
            f"decode is to have {said} start Ray with more: ray.init(num_cpus=...).",
            on_command_line=f"--ray-actors and --ray-resources ask for {said} add nodes.",
        )


def settle(resources: Resources) -> None:
    """Restrict this process, an actor with `resources`, to these, before it asks JAX for a device.

    Without an accelerator it is bound to cores of its own, by whose number JAX sizes its threads. Raises UsageError
    if JAX does not find the accelerator.
    """
    wanted = platform_of(resources)
    if wanted != "cpu":
        if (found := platform()) != wanted:
            extra = {"gpu": "cuda13"}.get(wanted, wanted)
            raise UsageError(
                f"An actor has a {wanted.upper()}, but JAX finds only a {found}; install et_jax[{extra}] on every node."
            )
        return
    jax.config.update("jax_platforms", "cpu")
    if hasattr(os, "sched_setaffinity"):
        cores = own_cores(max(1, int(resources.get("CPU", 1))), Path(tempfile.gettempdir()))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def own_cores(count: int, folder: Path) -> list[int]:
    """Return `count` cores of this machine, if possible ones that no other actor has reserved.

    Locks on files in `folder` reserve them until the process ends.
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
