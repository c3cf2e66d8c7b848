"""A sequence that a step passes over waits one step more, and one that is served waits no longer."""

import jax
import numpy as np
from served import begun


def test_waits_are_counted(served):
    device = begun(served, slots=4)
    waited = np.asarray(device.state.control.wait)
    output, ran, _ = device.decode(4, device.config.batch, until_end=False)
    advanced = np.asarray(output.produced)[:ran].reshape(ran, -1, len(waited)).any(axis=1)
    for step in advanced:
        waited = np.where(step, 0, waited + 1)
    assert waited.any() and not advanced.all()
    np.testing.assert_array_equal(jax.device_get(device.state.control.wait), waited)
