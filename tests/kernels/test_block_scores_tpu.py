"""The TPU kernels of the pass over page summaries, interpreted on a CPU and lowered for a TPU that is not here."""

import jax
import numpy as np
import pytest
from absent_tpu import lower, strictly
from ladder import results, taken
from test_block_scores import CAP, NAMED, assert_close, assert_equals_reference, formula, poisoned

from et_jax.pallas.block_scores import tpu
from et_jax.pallas.ring import RingConfig
from scripts.measuring.kernel_shapes.block_scores import SHAPES, TESTED, Shape, example

# few buffers of few pages: lists go round the ring several times
SMALL = RingConfig(group=4, depth=3)
KERNELS = {"block": tpu.block_scores, "code": tpu.code_scores}
# A shape for each path: whole heads and heads beside others, empty rows, more than a row of lanes.
PATHS = {
    "block": [NAMED[name] for name in ("heads_8", "group_3", "dim_96", "empty_slots")],
    "code": [NAMED[name] for name in ("codes_group_3", "codes_dim_96")],
}
# Lists that fill several groups of the ring that is served.
SEVERAL_GROUPS = {"block": [NAMED["many_blocks"]], "code": [NAMED["codes_many_blocks"]]}
# What else is served, interpreted without a detector of races: one shape of a kind, and all of them by the slow test.
BREADTH = {
    "block": [
        NAMED[name] for name in ("group_1", "group_8", "dim_256", "page_128", "one_token", "spare", "many_blocks")
    ],
    "code": [NAMED[name] for name in ("codes_dim_256", "codes_page_128", "codes_many_blocks")],
}


def served(name: str, shapes: tuple[Shape, ...]) -> list[Shape]:
    """The shapes that a kernel does not refuse."""
    if name == "block":
        return list(shapes)
    return [shape for shape in shapes if shape.num_kv_heads == 4 or shape.num_kv_heads % 8 == 0]


@pytest.mark.parametrize("name", KERNELS)
def test_equals_reference(name, rung):
    def check(shape: Shape):
        arguments = example(shape)
        got = results(KERNELS[name], arguments, config=SMALL, interpret=True, **shape.settings)
        assert_equals_reference(got, name, arguments, shape)

    rung(f"{name}_scores tpu = reference", BREADTH[name], {"block": 7, "code": 3}[name], check)


@pytest.mark.parametrize("case", ["codes_group_3", "codes_dim_256"])
def test_codes_are_summed_after_the_cap(case):
    shape = NAMED[case]
    arguments = example(shape)
    got = results(tpu.code_scores, arguments, config=SMALL, interpret=True, soft_cap=CAP, **shape.settings)
    assert_close(got, formula("code", arguments, shape, CAP))


def is_right(name: str, shape: Shape, arguments, config: RingConfig | None = SMALL):
    got = strictly(KERNELS[name], arguments, config=config, **shape.settings)
    assert_equals_reference(got, name, arguments, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("block", 20), ("code", 7)])
def test_has_no_race_in_any_shape(name, count, rung):
    def check(shape: Shape):
        is_right(name, shape, poisoned(example(shape), shape))

    rung(f"{name}_scores tpu without races", served(name, TESTED), count, check)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("block", 5), ("code", 3)])
def test_has_no_race_in_the_ring_that_is_served(name, count, rung):
    def check(shape: Shape):
        is_right(name, shape, poisoned(example(shape), shape), None)

    rung(f"{name}_scores tpu without races, its own ring", [*PATHS[name], *SEVERAL_GROUPS[name]], count, check)


@pytest.mark.parametrize("name", KERNELS)
def test_pages_that_hold_no_block_are_not_copied(name):
    """Page ids past the pool stand at every block past the length: to copy one raises."""
    shape = NAMED["codes_group_3"]
    arguments = example(shape)
    table = np.array(arguments["page_table"])
    past = np.arange(table.shape[1]) * shape.page_size >= np.asarray(shape.lengths)[:, None]
    faulty = arguments | {"page_table": np.where(past, 2 * table.size, table).astype(np.int32)}
    got = strictly(KERNELS[name], faulty, config=SMALL, **shape.settings)
    assert_equals_reference(got, name, arguments, shape)


@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_copy_is_found(name, broken_ring):
    """The kernel races or is wrong."""
    shape = NAMED["codes_group_3"]
    with pytest.raises(AssertionError):
        is_right(name, shape, example(shape))


def shapes_of(name: str, shape: Shape):
    """The arguments' shapes and dtypes: nothing is drawn."""
    b, k, n, d = len(shape.lengths), shape.num_kv_heads, shape.num_blocks, shape.head_dim
    pages = 1 + b * n
    arrays = {
        "q": ((b, shape.num_heads, d), shape.dtype),
        "key_box": ((k, pages, shape.width), shape.dtype),
        "mean": ((k, pages, shape.width), np.float32),
        "key_codes": ((k, pages, shape.page_size * d), np.int8),
        "page_table": ((b, n), np.int32),
        "lengths": ((b,), np.int32),
    }
    return {key: jax.ShapeDtypeStruct(*arrays[key]) for key in taken(KERNELS[name], arrays)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("block", 4), ("code", 2)])
def test_lowers_for_a_tpu(name, count, rung):
    shapes = served(name, tuple(shape for shape in SHAPES if not shape.tested))
    rung(
        f"{name}_scores tpu lowers",
        shapes,
        count,
        lambda shape: lower(KERNELS[name], shapes_of(name, shape), **shape.settings),
    )


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("block", {"lengths": (5_000_000,)}, 'bytes of scalar memory: use "xla", or fewer blocks a slot'),
        ("block", {"lengths": (600_000,), "num_heads": 64}, 'bytes of vector memory: use "xla", or fewer blocks'),
        ("code", {"num_kv_heads": 2}, 'reads codes of 4 or a multiple of 8 KV heads, not 2: use "xla"'),
        ("code", {"lengths": (7 * 16,)}, "pool of no multiple of 8 pages, not 8: add one"),
        ("code", {"page_size": 1}, "multiple of 2 tokens at head dim 64, not 1"),
    ],
)
def test_what_it_cannot_serve_is_refused(name, change, reason):
    shape = dict(name="refused", num_heads=4, num_kv_heads=4, head_dim=64, page_size=16, lengths=(64,))
    shape = Shape(**(shape | change))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda arrays: KERNELS[name](**arrays, **shape.settings), shapes_of(name, shape))
