"""Small models over eight devices: the texts, the reads and the logits of one device."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from places import HELPERS


@pytest.fixture(scope="module")
def found(hardly_optimised):
    """What a process of eight devices says."""
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, str(HELPERS / "eight_devices.py")],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["llama off", "llama certified", "odd paper"])
def test_a_model_over_eight_devices_is_the_model_on_one(found, case):
    """Its sums are those of eight parts, so that float32 rounds them otherwise."""
    said = found[case]
    alone, together = said["texts"]
    assert together == alone and all(len(text) == 24 for text in together)
    assert said["logits"] <= 1e-5 * max(1.0, said["largest"])
    assert said["signals"]
    alone, together = said["reads"]
    assert together == alone
    if case != "llama off":
        assert np.sum(together) < np.sum(found["llama off"]["reads"][1])
    if case == "llama certified":  # no head leaves more of its mass unread than its tolerance
        assert 0.5 <= said["kept"] < 1.0
