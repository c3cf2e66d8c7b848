"""The usable memory of the default device, or of the host."""

import os
from pathlib import Path

import jax

from et_jax.errors import UsageError


def usable_memory(fraction: float, together: int = 1) -> int:
    """Return the bytes that may be used on a device: the share `fraction` of the default device's free memory.

    Devices that report no memory, such as CPUs, share the host's; a model is split over `together` of them. Raises
    UsageError for a fraction outside 0 to 1.
    """
    if not 0 < fraction <= 1:
        raise UsageError(f"memory_fraction is {fraction}; it must be above 0 and at most 1.")
    stats = jax.devices()[0].memory_stats()
    free = host_memory() // together if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]
    return int(fraction * free)


def num_sharing(replicas: int, together: int = 1) -> int:
    """Return how many of the `replicas` share the memory of a device; on a CPU all do.

    Replicas are placed on the devices in turn, each on `together` of them.
    """
    devices = jax.local_devices()
    return replicas if devices[0].memory_stats() is None else -(-replicas // (len(devices) // together))


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: free memory, or the rest of its control group's limit.

    Read from Linux files below `root`; on other systems, all memory of the machine.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (available,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([available, *_group_memory(root)])


def _group_memory(root: Path) -> list[int]:
    """Return the free bytes of each control group of this process, version 2 or 1, that has a limit.

    Cached pages of inactive files count as free.
    """
    paths = dict(line.split(":", 2)[1:] for line in _lines(root / "proc/self/cgroup"))
    two, one = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    version_2 = [two / paths.get("", "/").lstrip("/"), two]
    version_1 = [one / paths.get("memory", "/").lstrip("/"), one]
    left = []
    for folders, limit, usage, idle in (
        (version_2, "memory.max", "memory.current", "inactive_file"),
        (version_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in folders:
            most, used = _lines(folder / limit), _lines(folder / usage)
            if most and used and most[0] != "max":
                cached = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == idle]
                left.append(max(0, int(most[0]) - int(used[0]) + sum(cached)))
    return left


def _lines(file: Path) -> list[str]:
    """Return the lines of a file, or none if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
