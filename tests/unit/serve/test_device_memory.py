"""Free memory, read from the files of Linux laid out in a folder."""

import jax
import pytest

from et_jax.errors import UsageError
from et_jax.serve.memory.device_memory import host_memory, num_sharing, usable_memory

GB = 10**9
FREE = {"proc/meminfo": f"MemTotal: 64000000 kB\nMemAvailable: {32 * GB // 1024} kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory/box"
IN_V2 = {f"{V2}/memory.current": f"{3 * GB}", f"{V2}/memory.stat": f"anon 5\ninactive_file {GB}\n"}
IN_BOX = {name.replace(V2, f"{V2}/box"): text for name, text in IN_V2.items()} | {"proc/self/cgroup": "0::/box\n"}
IN_V1 = {
    "proc/self/cgroup": "9:memory:/box\n1:cpu:/\n",
    f"{V1}/memory.usage_in_bytes": f"{3 * GB}",
    f"{V1}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 32 * GB),
        (IN_V2 | {f"{V2}/memory.max": f"{8 * GB}"}, 6 * GB),
        (IN_BOX | {f"{V2}/box/memory.max": f"{8 * GB}"}, 6 * GB),
        (IN_BOX | {f"{V2}/box/memory.max": f"{GB}"}, 0),
        (IN_V1 | {f"{V1}/memory.limit_in_bytes": f"{8 * GB}"}, 6 * GB),
    ],
)
def test_free_memory_is_that_of_the_host_or_less_within_a_control_group(tmp_path, files, free):
    for name, text in (FREE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == free


class Chip:
    """A device with memory of its own."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 100, "bytes_in_use": 20}


def test_a_share_of_what_the_device_has_left_and_on_a_cpu_its_host(monkeypatch):
    monkeypatch.setattr("et_jax.serve.memory.device_memory.host_memory", lambda: 1000)
    assert jax.devices()[0].memory_stats() is None and usable_memory(0.9) == 900 and num_sharing(3) == 3
    monkeypatch.setattr(jax, "devices", lambda: [Chip()])
    assert usable_memory(0.5) == 40
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="memory_fraction is"):
            usable_memory(fraction)
    monkeypatch.setattr(jax, "local_devices", lambda: [Chip()] * 4)
    assert [num_sharing(number) for number in (1, 4, 5)] == [1, 1, 2]
