"""What every backend does alike, simulated or interpreted where its chip is not here, and which runs on what."""

import dataclasses
import itertools

import jax
import pytest
from cases import ATTENTION, CODE, PREFILL, assert_fault_shows, with_a_fault
from ladder import CAP, MIXED, of_two_dtypes, results
from test_gpu_kernels import lower, run
from test_tpu_kernels import plain

from et_jax.pallas.backend import pick, resolve

XLA = ("reference", "xla")


def got(backend, operation, arguments, shape, **more):
    """What a backend returns on the CPU, as NumPy."""
    if backend in XLA:
        return results(operation.function, arguments, backend=backend, **shape.settings, **more)
    return {"gpu": run, "tpu": plain}[backend](operation, arguments, shape, **more)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *itertools.product(XLA, ("group_3", "codes_dim_96", "empty_slots")),
        ("tpu", "codes_group_3"),
        pytest.param("gpu", "page_64", marks=pytest.mark.slow),
    ],
)
def test_codes_are_summed_after_the_cap(backend, name):
    shape = CODE.shapes[name]
    arguments = CODE.example(shape)
    CODE.assert_close(got(backend, CODE, arguments, shape, soft_cap=CAP), CODE.formula(arguments, shape, CAP), shape)
    if backend == "gpu":
        lower(CODE, shape, soft_cap=CAP)


@pytest.mark.parametrize("dtypes", MIXED)
@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [(ATTENTION, "group_2"), (PREFILL, "group_4_bfloat16")],
    ids=lambda each: getattr(each, "name", each),
)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(operation, name, backend, dtypes):
    shape = dataclasses.replace(operation.shapes[name], dtype=dtypes[0])
    arguments = of_two_dtypes(operation.example(shape), *dtypes)
    expected = got("reference", operation, arguments, shape)
    operation.assert_close(got(backend, operation, arguments, shape), expected, shape)


FAULTS = [  # a shape, a column of its tokens, and a place, by default behind the beginning of the chunk
    *itertools.product((*XLA, "tpu"), [("sinks", 3), ("sinks", 70), ("int8", 0), ("int8", 64)]),
    ("tpu", ("dim_128", 200)),
    *itertools.product(["gpu"], [("hopper_group_1", column, place) for column in (3, 130) for place in (5, 33)]),
    ("gpu", ("hopper_fp8", 0, 115)),
]


@pytest.mark.parametrize(
    ("backend", "fault"), FAULTS, ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each))
)
def test_a_fault_that_is_seen_shows(backend, fault):
    """A NaN in a key or a value, before the chunk or in it, reaches every query that sees it, and no other."""
    name, column, *place = fault
    shape = PREFILL.shapes[name]
    at = place[0] if place else shape.starts[0] + 5
    faulty = with_a_fault(PREFILL.example(shape), shape, column, at)
    assert_fault_shows(got(backend, PREFILL, faulty, shape)[0], shape, at)


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
