"""The TPU kernel of decode attention, interpreted on a CPU and lowered for a TPU that is not here."""

import dataclasses

import jax
import numpy as np
import pytest
from absent_tpu import lower, strictly
from ladder import compiled, fills_groups, numbers, results
from test_paged_attention import MIXED, NAMED, PLAIN, assert_equals_reference, of_two_dtypes, poisoned

from et_jax.pallas import ring
from et_jax.pallas.paged_attention import tpu
from et_jax.pallas.ring import RingConfig
from scripts.measuring.kernel_shapes.paged_attention import SHAPES, TESTED, Shape, example

KERNEL = tpu.paged_attention
SERVED = [shape for shape in TESTED if not (shape.in_8_bits and shape.page_size % 32)]
# few buffers of few pages: lists go round the ring several times
SMALL = RingConfig(group=4, depth=3)
# A shape for each path: whole heads and heads beside their values, with and without padding columns; lists in order
# and with gaps, empty ones; what changes the scores; both dtypes; a pool in 8 bits; several rows a slot.
PATHS = [
    NAMED[name]
    for name in (
        "dim_128_bfloat16",
        "group_3",
        "dim_96",
        "empty_slots",
        "window",
        "all_of_them",
        "int8_bfloat16",
        "fp8_dim_96",
        "rows_5",
        "rows_all_of_them",
        "rows_int8",
    )
]
# Interpreted without a detector of races: a few shapes, and all that are served by the slow test.
BREADTH = [NAMED[name] for name in ("group_8", "sinks", "rows_3")]


def plain(arguments, **settings):
    """Attention and block sums as float64 numpy, interpreted without checks."""
    return numbers(results(KERNEL, arguments, config=SMALL, interpret=True, **settings))


@pytest.mark.parametrize("dtypes", MIXED)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(dtypes):
    shape = dataclasses.replace(NAMED["group_2"], dtype=dtypes[0])
    arguments = of_two_dtypes(example(shape), *dtypes)
    assert_equals_reference(plain(arguments, **shape.settings), arguments, shape)


def test_equals_reference(rung):
    def check(shape: Shape):
        arguments = example(shape)
        assert_equals_reference(plain(arguments, **shape.settings), arguments, shape)

    rung("paged_attention tpu = reference", BREADTH, 3, check)


def has_no_race(shape: Shape, config: RingConfig | None = SMALL):
    arguments = poisoned(example(shape), shape)
    assert_equals_reference(strictly(KERNEL, arguments, config=config, **shape.settings), arguments, shape)


@pytest.mark.slow
def test_has_no_race_in_any_shape(rung):
    """But those for Hopper: their pages are raced in the ring that is served."""
    rung("paged_attention tpu without races", [shape for shape in SERVED if shape in PLAIN], 39, has_no_race)


@pytest.mark.slow
def test_has_no_race_in_the_ring_that_is_served(rung):
    """In a shape for each path, and in all whose lists may fill several of its groups."""
    shapes = [shape for shape in SERVED if shape in PATHS or fills_groups(shape, tpu.GROUP_TOKENS)]
    rung("paged_attention tpu without races, its own ring", shapes, 19, lambda shape: has_no_race(shape, None))


def test_nothing_listed_gives_zero_and_minus_infinity():
    shape = NAMED["sinks"]
    arguments = example(shape)
    arguments["counts"] = np.zeros(arguments["counts"].shape, np.int32)
    out, block_lse = strictly(KERNEL, arguments, config=SMALL)
    assert (out == 0).all() and (block_lse == -np.inf).all()


def test_what_is_not_listed_is_not_copied():
    """Page ids past the pool stand at every place that is not listed: to copy one raises."""
    shape = NAMED["sparse"]
    arguments = example(shape)
    table, blocks, counts = (np.array(arguments[name]) for name in ("page_table", "blocks", "counts"))
    read = np.zeros(table.shape, bool)
    for row in range(len(shape.lengths)):
        for head in range(shape.num_kv_heads):
            read[row, blocks[row, head, : counts[row, head]]] = True
    table[~read] = 2 * table.size
    blocks[np.arange(blocks.shape[2]) >= counts[..., None]] = 2 * table.size
    got = strictly(KERNEL, arguments | {"page_table": table, "blocks": blocks}, config=SMALL)
    assert_equals_reference(got, arguments, shape)


def test_a_row_keeps_its_bits_in_any_company():
    """Lists emptied around it, cut short, in another order of slots: a row's output is the same, bit for bit."""
    shape = NAMED["window"]
    arguments = jax.tree.map(np.array, example(shape))
    expected = plain(arguments)
    alone = arguments | {"counts": arguments["counts"] * (np.arange(3)[:, None] == 0).astype(np.int32)}
    by_row = ("q", "page_table", "blocks", "counts", "lengths")
    turned = arguments | {key: arguments[key][::-1] for key in by_row}
    wider = arguments | {"blocks": np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 131)), constant_values=7)}
    for case, place in ((alone, 0), (turned, 2), (wider, 0)):
        for got, wanted in zip(plain(case), expected, strict=True):
            np.testing.assert_array_equal(got[place][..., : wanted.shape[2]], wanted[0])


def test_more_rows_than_fit_are_read_in_parts(monkeypatch):
    shape = NAMED["rows_apart"]
    arguments = example(shape)
    together = []
    kept = tpu.split
    monkeypatch.setattr(
        tpu, "split", lambda rows_per_slot, rows, *lists: together.append(rows) or kept(rows_per_slot, rows, *lists)
    )
    for rows in (4, 2):
        pages, m = arguments["pages"], arguments["blocks"].shape[2]
        needed = tpu.footprint(SMALL, pages, 2, shape.num_heads, shape.num_blocks, m, rows, read_apart=True).vector
        monkeypatch.setattr(ring, "VECTOR_MEMORY_BYTES", needed)
        compiled.cache_clear()
        assert_equals_reference(plain(arguments, **shape.settings), arguments, shape)
    assert together == [4, 2]
    compiled.cache_clear()


def assert_caught():
    """The kernel races or is wrong."""
    shape = NAMED["group_3"]
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_equals_reference(strictly(KERNEL, arguments, config=SMALL), arguments, shape)


def test_a_broken_copy_is_found(broken_ring):
    assert_caught()


def test_a_buffer_written_too_early_is_found(monkeypatch):
    """Every copy that runs ahead lands in the buffer that is being worked on."""
    compiled.cache_clear()
    monkeypatch.setattr(ring.Ring, "buffer", lambda self, i: (self.first_ref[0] + i) % (self.depth - 1))
    assert_caught()
    compiled.cache_clear()


def test_a_page_past_the_pool_is_found():
    arguments = example(NAMED["group_3"])
    with pytest.raises(Exception, match=r"[Oo]ut.of.bounds"):
        strictly(KERNEL, arguments | {"page_table": arguments["page_table"] + 10_000}, config=SMALL)


def shapes_of(shape: Shape):
    """The arguments of a shape, with no contents."""
    b, n, k = len(shape.lengths), shape.num_blocks, shape.num_kv_heads
    listed = jax.ShapeDtypeStruct((b, k, n), np.int32)
    pool = (k, 1 + b * n, shape.page_size, shape.width)
    return {
        "q": jax.ShapeDtypeStruct((b * shape.rows, shape.num_heads, shape.head_dim), shape.dtype),
        "pages": jax.ShapeDtypeStruct(pool, shape.in_8_bits or shape.dtype),
        "kv_scales": jax.ShapeDtypeStruct((*pool[:2], 2, pool[2]), np.float32) if shape.in_8_bits else None,
        "page_table": jax.ShapeDtypeStruct((b, n), np.int32),
        "blocks": listed,
        "counts": jax.ShapeDtypeStruct(listed.shape[:2], np.int32),
        "lengths": jax.ShapeDtypeStruct((b * shape.rows,), np.int32),
        "readers": listed if shape.read_apart else None,
        "softmax": shape.softmax(),
    }


@pytest.mark.slow
def test_lowers_for_a_tpu(rung):
    chip_shapes = [shape for shape in SHAPES if not shape.tested]
    rung("paged_attention tpu lowers", chip_shapes, 12, lambda shape: lower(KERNEL, shapes_of(shape), **shape.settings))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 16, "in_8_bits": "int8"}, 'reads int8 pages of a multiple of 32 tokens, not 16: use "xla"'),
        ({"page_size": 4}, 'reads float32 pages of a multiple of 8 tokens, not 4: use "xla"'),
        ({"lengths": (2_000_000,)}, 'bytes of scalar memory: use "xla", or pages of more than 16 tokens'),
        ({"page_size": 16384, "lengths": (16384,)}, 'bytes of vector memory: use "xla", or smaller pages'),
    ],
)
def test_what_it_cannot_serve_is_refused(change, reason):
    shape = Shape(
        **(dict(name="refused", num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, lengths=(64,)) | change)
    )
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda arrays: KERNEL(**arrays), shapes_of(shape))
