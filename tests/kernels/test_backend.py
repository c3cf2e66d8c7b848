"""Which backend runs on what."""

import dataclasses

import jax
import pytest

from et_jax.pallas.backend import pick, resolve


@dataclasses.dataclass
class Device:
    """What is asked of a device."""

    platform: str
    compute_capability: str


HOPPER, AMPERE = Device("gpu", "9.0"), Device("gpu", "8.0")
EVERY = ["reference", "xla", "gpu", "tpu"]


def test_a_program_traced_for_an_absent_chip_gets_its_backend():
    absent = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=absent)
    with jax.sharding.use_abstract_mesh(mesh):
        assert pick() == resolve("tpu", EVERY) == "tpu"
    assert pick() == pick(jax.devices()[0]) == "xla"
    assert resolve("reference", ["reference", "xla"]) == "reference"  # only by name
    assert pick("gpu", EVERY) == resolve(None, EVERY, AMPERE) == resolve(None, ["xla"], HOPPER) == "xla"
    assert pick(HOPPER, EVERY) == "gpu"


@pytest.mark.parametrize(
    ("name", "built", "device", "reason"),
    [
        ("tpu", EVERY, "cpu", 'backend "tpu" supports tpu, not cpu: use "xla"'),
        ("gpu", EVERY, AMPERE, r'supports gpu 9.0, not gpu of compute capability 8.0: use "xla"'),
        ("gpu", ["reference", "xla"], None, 'backend "gpu" .*: use "xla"'),
        (None, ["reference"], "cpu", 'has no backend among "reference"'),
        ("triton", EVERY, None, 'backend: got "triton", wanted one of "reference", "xla", "gpu", "tpu"'),
    ],
)
def test_a_backend_that_cannot_run_is_refused(name, built, device, reason):
    with pytest.raises(ValueError if name == "triton" else NotImplementedError, match=reason):
        resolve(name, built, device)
