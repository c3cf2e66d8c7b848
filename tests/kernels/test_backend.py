"""Which backend serves what."""

import dataclasses

import jax
import pytest

from et_jax.pallas.backend import pick, resolve


@dataclasses.dataclass
class Device:
    """What of a device the table looks at."""

    platform: str
    compute_capability: str


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_serves_every_platform(platform):
    assert pick(platform, ["reference", "xla"]) == "xla"


def test_a_tpu_has_its_own():
    assert pick("tpu") == "tpu"
    with pytest.raises(NotImplementedError, match='backend "tpu" serves tpu, not cpu: use "xla"'):
        resolve("tpu", ["reference", "tpu", "xla"], "cpu")


def test_a_program_traced_for_an_absent_chip_gets_its_backend():
    absent = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=absent)
    with jax.sharding.use_abstract_mesh(mesh):
        assert pick() == resolve("tpu", ["reference", "tpu", "xla"]) == "tpu"
    assert pick() == "xla"


def test_the_default_device_has_a_backend():
    assert pick() == pick(jax.devices()[0]) == "xla"


def test_reference_runs_only_by_name():
    assert resolve("reference", ["reference", "xla"]) == "reference"
    with pytest.raises(NotImplementedError, match='has no backend among "reference"'):
        pick("cpu", ["reference"])


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_a_backend_that_is_not_built_names_the_one_that_is(name):
    with pytest.raises(NotImplementedError, match=f'backend "{name}" .*: use "xla"'):
        resolve(name, ["reference", "xla"])


def test_an_unknown_name_is_a_value_error():
    with pytest.raises(ValueError, match='backend: got "triton", wanted one of "reference", "xla", "gpu", "tpu"'):
        resolve("triton", ["reference", "xla"])


def test_only_hopper_gets_the_kernel_for_gpus():
    built = ["reference", "xla", "gpu"]
    hopper, ampere = Device("gpu", "9.0"), Device("gpu", "8.0")
    assert resolve(None, built, "cpu") == "xla"
    assert pick(hopper, built) == "gpu"
    assert pick(ampere, built) == pick("gpu", built) == "xla"
    assert pick(hopper, ["xla"]) == "xla"
    with pytest.raises(NotImplementedError, match=r'serves gpu 9.0, not gpu of compute capability 8.0: use "xla"'):
        resolve("gpu", built, ampere)
    with pytest.raises(NotImplementedError, match=r'serves gpu 9.0, not cpu: use "xla"'):
        resolve("gpu", built, "cpu")
