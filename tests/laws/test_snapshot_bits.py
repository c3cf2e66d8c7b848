"""A state saved amid its texts goes on from disk bit for bit, and a fork writes what its source does."""

import jax
import numpy as np
from served import same_bits

from et_jax.decode import snapshots
from et_jax.decode.request import request
from et_jax.serve.device import Device


def begun(served) -> Device:
    """A greedy and a sampled sequence, in slots 0 and 1, some steps on their way."""
    device = Device(served.model._weights, served.model.decoder())
    chunk = device.config.chunk
    for slot, length in enumerate((11, 19)):
        prompt = served.tokens[slot : slot + length]
        for at in range(0, length - 1, chunk):
            end = min(at + chunk, length - 1)
            device.prefill([(slot, prompt[at:end])], ends=[slot] if end == length - 1 else [])
        device.insert(slot, request(device.config, prompt, limit=30, seed=slot, temperature=float(slot)))
    device.decode(5, until_end=False)
    assert all(granted.all() for granted in device.promises)
    return device


def test_a_state_from_disk_goes_on_as_it_would_have(served, tmp_path):
    device = begun(served)
    snapshots.save(tmp_path / "state", device.state)
    output, ran = device.decode(12, until_end=False)
    other = Device(served.model._weights, served.model.decoder())
    other.state = jax.device_put(snapshots.restore(tmp_path / "state", other.state), other._where)
    again, _ = other.decode(12, until_end=False)
    assert same_bits((device.state, output), (other.state, again))
    assert ran == 12 and np.asarray(output.produced).sum() >= 24


def test_a_fork_writes_what_its_source_does_and_leaves_it_alone(served):
    apart, device = begun(served), begun(served)
    apart.decode(12, until_end=False)
    device.state, granted = device.decoder.fork(device.state, np.int32(0), np.int32(2))
    assert granted
    output, _ = device.decode(12, until_end=False)
    produced, tokens = np.asarray(output.produced), np.asarray(output.token)
    texts = [tokens[..., slot][produced[..., slot]].tolist() for slot in range(3)]
    assert texts[2] == texts[0] and len(texts[0]) >= 12
    assert same_bits(apart.state.signals.entropy[:2], device.state.signals.entropy[:2])
