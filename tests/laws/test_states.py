"""The state of a decoder amid its texts: from disk, forked, and the waits it counts."""

import jax
import jax.numpy as jnp
import numpy as np
from served import begun
from small_model import same_bits

from et_jax.decode.cache import snapshots
from et_jax.decode.output import unpacked_steps
from et_jax.decode.sampling.steering import UNLIMITED
from et_jax.types import replace


def decoded(device, steps: int = 12):
    """Decode for all slots, and return the outputs of so many steps and how many of them ran."""
    return unpacked_steps(device.decode(steps, device.config.batch, until_end=False)[0])


def texts_of(output) -> list[list[int]]:
    """The tokens that a burst brought each of the first slots."""
    produced, tokens = np.asarray(output.produced), np.asarray(output.token)
    return [tokens[..., slot][produced[..., slot]].tolist() for slot in range(3)]


def test_a_state_from_disk_goes_on_as_it_would_have(served, tmp_path):
    device = begun(served)
    snapshots.save(tmp_path / "state", device.state)
    output, ran = decoded(device)
    other = served.device()
    other.state = jax.device_put(snapshots.restore(tmp_path / "state", other.state), other._where)
    again, _ = decoded(other)
    assert same_bits((device.state, output), (other.state, again))
    assert ran == 12 and np.asarray(output.produced).sum() >= 24


def test_a_fork_writes_what_its_source_does_and_leaves_it_alone(served):
    apart, device = begun(served), begun(served)
    decoded(apart)
    device.state, granted = device.decoder.fork(device.state, np.int32(0), np.int32(2))
    assert granted
    output, _ = decoded(device)
    texts = texts_of(output)
    assert texts[2] == texts[0] and len(texts[0]) >= 12
    assert same_bits(apart.state.signals.entropy[:2], device.state.signals.entropy[:2])


def test_a_slot_pauses_when_its_allowance_is_spent_and_goes_on_where_it_was(served):
    """Its tokens are those of a slot that never paused, and so are its neighbour's; nobody waits for it."""
    apart, device = begun(served), begun(served)
    expected = texts_of(decoded(apart)[0])

    def allowed(steps: int, allowance: list[int]) -> tuple[list[list[int]], int]:
        state = device.state
        left = state.allowance.at[jnp.arange(len(allowance))].set(jnp.asarray(allowance, jnp.int32))
        device.state = replace(state, allowance=left)
        output, ran = decoded(device, steps)
        return texts_of(output), int(ran)

    first, _ = allowed(8, [2])
    assert first[0] == expected[0][:2] and len(first[1]) >= 6 and first[1] == expected[1][: len(first[1])]
    assert int(device.state.allowance[0]) == 0 and int(device.state.control.wait[0]) <= 1
    for number in range(2, 8):  # however well drafts hold
        assert allowed(2, [1, 0])[0][0] == expected[0][number : number + 1]
    second, _ = allowed(12, [UNLIMITED, 0])
    assert (expected[0][:8] + second[0])[: len(expected[0])] == expected[0] and not second[1]
    assert allowed(4, [0, 0])[1] == 0


def test_waits_are_counted(served):
    device = begun(served, slots=4)
    waited = np.asarray(device.state.control.wait)
    output, ran = decoded(device, 4)
    advanced = np.asarray(output.produced)[:ran].reshape(ran, -1, len(waited)).any(axis=1)
    for step in advanced:
        waited = np.where(step, 0, waited + 1)
    assert waited.any() and not advanced.all()
    np.testing.assert_array_equal(jax.device_get(device.state.control.wait), waited)
