"""What every backend does alike, simulated or interpreted where its chip is not here, and which runs on what."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from cases import ATTENTION, BLOCK, CODE, PREFILL, assert_fault_shows, kernel, with_a_fault
from ladder import CAP, TPU, as_bytes, results
from test_gpu_kernels import lower, run
from test_tpu_kernels import plain, shapes_of

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


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [(ATTENTION, "group_2"), (PREFILL, "group_4_bfloat16")],
    ids=lambda each: getattr(each, "name", each),
)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(operation, name, backend, dtypes):
    shape = dataclasses.replace(operation.shapes[name], dtype=dtypes[0])
    given, (queries, pages) = operation.example(shape), dtypes
    arguments = given | {"q": given["q"].astype(queries), "pages": given["pages"].astype(pages)}
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


@pytest.mark.parametrize(("backend", "name"), [("gpu", "hopper_parts"), ("tpu", "window")])
def test_a_row_keeps_its_bits_in_any_batch(backend, name):
    """Beside empty lists, NaN in the pages of others, in another order of slots, and however lists are padded."""
    shape = ATTENTION.shapes[name]
    arguments = jax.tree.map(np.array, ATTENTION.example(shape))
    last, m = len(shape.lengths) - 1, arguments["blocks"].shape[2]
    faulty = arguments["pages"].copy()
    faulty[:, arguments["page_table"][1:]] = np.nan
    by_row = ("q", "page_table", "blocks", "counts", "lengths")
    changes = [
        ({"counts": arguments["counts"] * (np.arange(last + 1)[:, None] == 0).astype(np.int32)}, 0),
        ({"pages": faulty}, 0),
        ({key: arguments[key][::-1] for key in by_row}, last),
        ({"blocks": np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 131)), constant_values=7)}, 0),
    ]
    expected = as_bytes(got(backend, ATTENTION, arguments, shape))
    for change, place in changes:
        out, block_lse = as_bytes(got(backend, ATTENTION, arguments | change, shape))
        np.testing.assert_array_equal(out[place], expected[0][0])
        np.testing.assert_array_equal(block_lse[place][:, : 4 * m], expected[1][0])


CHUNKS = [
    *itertools.product(XLA, ("group_3", "window", "group_4_bfloat16", "int8", "fp8_dim_96")),
    *itertools.product(["gpu"], ("hopper_group_3", "hopper_window", "hopper_fp8")),
]


@pytest.mark.parametrize(("backend", "name"), CHUNKS)
def test_tokens_of_a_chunk_past_a_query_may_be_nan(backend, name):
    """With half the chunk real, the other half's keys and the null page NaN, real rows keep their bits."""
    shape = PREFILL.shapes[name]
    arguments, real = PREFILL.example(shape), shape.chunk // 2
    clean, dirty = (
        got(backend, PREFILL, given, shape)[0] for given in (arguments, PREFILL.poisoned(arguments, shape, real))
    )
    np.testing.assert_array_equal(*(as_bytes(out[:, :real]) for out in (dirty, clean)))


ATTENDED = {"num_heads": 4, "num_kv_heads": 2, "lengths": (64,)}
SCORED = {"num_heads": 4, "num_kv_heads": 4, "lengths": (64,)}
ONE_PAGE = {"page_size": 16384, "lengths": (16384,)}
UNSERVED = [  # what a shape of a backend is changed to, and why it is refused
    ("gpu", ATTENTION, {"dtype": "float32"}, "multiplies bfloat16, not float32"),
    ("gpu", ATTENTION, {"dtype": "float32", "in_8_bits": "int8"}, "not float32 queries with int8 pages"),
    ("gpu", ATTENTION, {"page_size": 16}, "reads pages of entire tiles of 64 tokens, not of 16"),
    ("gpu", ATTENTION, {"head_dim": 96}, "is laid out for head dims of 64, 128 and 256, not 96"),
    ("gpu", ATTENTION, {"num_heads": 17, "num_kv_heads": 1}, "has columns for 16 query heads a KV head, not 17"),
    ("gpu", BLOCK, {"head_dim": 96}, "has registers for head dims of 64 and 128, not 96"),
    ("gpu", CODE, {"page_size": 8}, "reads codes of pages of a power of two from 16 tokens on, not of 8"),
    ("tpu", ATTENTION, ATTENDED | {"in_8_bits": "int8"}, "reads int8 pages of a multiple of 32 tokens, not 16"),
    ("tpu", ATTENTION, ATTENDED | {"page_size": 4}, "reads float32 pages of a multiple of 8 tokens, not 4"),
    ("tpu", ATTENTION, ATTENDED | {"lengths": (2_000_000,)}, 'scalar memory: use "xla", or pages of more than 16 to'),
    ("tpu", ATTENTION, ATTENDED | ONE_PAGE, 'vector memory: use "xla", or smaller pages'),
    ("tpu", PREFILL, {"page_size": 4}, "reads float32 pages of a multiple of 8 tokens, not 4"),
    ("tpu", PREFILL, {"starts": (2_000_000,)}, 'scalar memory: use "xla", or pages of more than 16 tokens'),
    ("tpu", PREFILL, {"page_size": 16384}, 'vector memory: use "xla", or smaller pages'),
    ("tpu", PREFILL, {"starts": (400_000,), "block_lse": True}, 'vector memory: use "xla", or shorter lists'),
    ("tpu", BLOCK, SCORED | {"lengths": (5_000_000,)}, 'scalar memory: use "xla", or fewer blocks a slot'),
    ("tpu", BLOCK, SCORED | {"lengths": (600_000,), "num_heads": 64}, 'vector memory: use "xla", or fewer blocks'),
    ("tpu", CODE, SCORED | {"page_size": 8}, "reads codes of a multiple of 16 tokens at head dim 64, not 8"),
]
SERVED = {
    "gpu": {ATTENTION: "hopper_group_1", BLOCK: "hopper_dim_128", CODE: "hopper_dim_128"},
    "tpu": {ATTENTION: "group_3", PREFILL: "sinks", BLOCK: "group_3", CODE: "group_3"},
}


@pytest.mark.parametrize(("backend", "operation", "change", "reason"), UNSERVED)
def test_what_is_not_served_is_refused_with_the_reason(backend, operation, change, reason):
    shape = dataclasses.replace(operation.shapes[SERVED[backend][operation]], **change)
    function = partial(kernel(operation, backend), **shape.settings)
    with pytest.raises(NotImplementedError, match=f'^backend "{backend}" .*{reason}') as refused:
        jax.eval_shape(lambda arrays: function(**arrays), shapes_of(operation, shape, backend))
    assert 'use "xla"' in str(refused.value)


@dataclasses.dataclass
class Device:
    """What is asked of a device."""

    platform: str
    compute_capability: str


HOPPER, AMPERE = Device("gpu", "9.0"), Device("gpu", "8.0")
EVERY = ["reference", "xla", "gpu", "tpu"]


def test_a_program_traced_for_an_absent_chip_gets_its_backend():
    with jax.sharding.use_abstract_mesh(TPU):
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
