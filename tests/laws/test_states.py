"""The state of a decoder amid its texts: from disk, forked, and the waits it counts."""

import jax
import numpy as np
from served import begun
from small_model import same_bits

from et_jax.decode.cache import snapshots


def test_a_state_from_disk_goes_on_as_it_would_have(served, tmp_path):
    device = begun(served)
    snapshots.save(tmp_path / "state", device.state)
    output, ran, _ = device.decode(12, device.config.batch, until_end=False)
    other = served.device()
    other.state = jax.device_put(snapshots.restore(tmp_path / "state", other.state), other._where)
    again, *_ = other.decode(12, other.config.batch, until_end=False)
    assert same_bits((device.state, output), (other.state, again))
    assert ran == 12 and np.asarray(output.produced).sum() >= 24


def test_a_fork_writes_what_its_source_does_and_leaves_it_alone(served):
    apart, device = begun(served), begun(served)
    apart.decode(12, apart.config.batch, until_end=False)
    device.state, granted = device.decoder.fork(device.state, np.int32(0), np.int32(2))
    assert granted
    output, *_ = device.decode(12, device.config.batch, until_end=False)
    produced, tokens = np.asarray(output.produced), np.asarray(output.token)
    texts = [tokens[..., slot][produced[..., slot]].tolist() for slot in range(3)]
    assert texts[2] == texts[0] and len(texts[0]) >= 12
    assert same_bits(apart.state.signals.entropy[:2], device.state.signals.entropy[:2])


def test_waits_are_counted(served):
    device = begun(served, slots=4)
    waited = np.asarray(device.state.control.wait)
    output, ran, _ = device.decode(4, device.config.batch, until_end=False)
    advanced = np.asarray(output.produced)[:ran].reshape(ran, -1, len(waited)).any(axis=1)
    for step in advanced:
        waited = np.where(step, 0, waited + 1)
    assert waited.any() and not advanced.all()
    np.testing.assert_array_equal(jax.device_get(device.state.control.wait), waited)
