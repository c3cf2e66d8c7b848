"""The TPU kernel of prefill attention, interpreted on a CPU and lowered for a TPU that is not here."""

import dataclasses

import jax
import numpy as np
import pytest
from absent_tpu import lower, strictly
from ladder import as_bytes, fills_groups, results, with_nan_unseen
from test_paged_prefill import (
    MIXED,
    NAMED,
    PLAIN,
    assert_equals_reference,
    assert_fault_shows,
    listing_every_block,
    of_two_dtypes,
    with_a_fault,
    with_nan_beyond_the_lists,
    written,
)

from et_jax.pallas.paged_prefill import tpu
from et_jax.pallas.paged_prefill.tpu import Config
from et_jax.pallas.ring import RingConfig
from scripts.measuring.kernel_shapes.paged_prefill import SHAPES, TESTED, Shape, example

KERNEL = tpu.paged_prefill
# several tiles a chunk, few buffers of few pages: the keys go round the ring several times
SMALL = Config(tile=16, ring=RingConfig(group=4, depth=3))
# A shape for each path: whole heads and heads beside their values, with and without padding columns; what changes
# the scores; rows far apart; lists and block sums; both dtypes; pools in 8 bits.
PATHS = [
    NAMED[name]
    for name in (
        "dim_128",
        "group_4_bfloat16",
        "dim_96",
        "ragged",
        "all_of_them",
        "sparse_all_of_them",
        "int8_all_of_them",
        "fp8_dim_96",
    )
]
# Interpreted without a detector of races: a few shapes, and all that are served by the slow test.
BREADTH = [NAMED[name] for name in ("group_16", "one_query", "sinks", "int8")]


def plain(arguments, shape: Shape):
    """Attention and block sums, interpreted without checks."""
    return results(KERNEL, arguments, config=SMALL, interpret=True, **shape.settings)


def poisoned(arguments, shape: Shape):
    """The same pool with NaN in all that no query sees: null page, what follows the chunk, padding columns."""
    if arguments["counts"] is not None:
        arguments = with_nan_beyond_the_lists(arguments, shape)
    return with_nan_unseen(arguments, written(arguments, shape, shape.chunk), 2 * shape.head_dim)


@pytest.mark.parametrize("dtypes", MIXED)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(dtypes):
    shape = dataclasses.replace(NAMED["group_4_bfloat16"], dtype=dtypes[0])
    arguments = of_two_dtypes(example(shape), *dtypes)
    assert_equals_reference(plain(arguments, shape), arguments, shape)


def test_equals_reference(rung):
    def check(shape: Shape):
        arguments = example(shape)
        assert_equals_reference(plain(arguments, shape), arguments, shape)

    rung("paged_prefill tpu = reference", BREADTH, 4, check)


def has_no_race(shape: Shape, config: Config | None = SMALL):
    arguments = poisoned(example(shape), shape)
    got = strictly(KERNEL, arguments, config=config, **shape.settings)
    assert_equals_reference(got, arguments, shape)


@pytest.mark.slow
def test_has_no_race_in_any_shape(rung):
    """But those for Hopper: their pages are raced in the cut that is served."""
    rung("paged_prefill tpu without races", PLAIN, 26, has_no_race)


@pytest.mark.slow
def test_has_no_race_in_the_cut_that_is_served(rung):
    """In a shape for each path, and in all whose keys may fill several groups of its ring."""
    shapes = [shape for shape in TESTED if shape in PATHS or fills_groups(shape, tpu.GROUP_TOKENS)]
    rung("paged_prefill tpu without races, its own cut", shapes, 19, lambda shape: has_no_race(shape, None))


@pytest.mark.parametrize(("name", "column"), [("sinks", 3), ("sinks", 70), ("dim_128", 3), ("dim_128", 200)])
def test_a_fault_that_is_seen_shows(name, column):
    """A NaN in a key or a value reaches every query that sees it, and no other."""
    shape = NAMED[name]
    arguments = example(shape)
    pages, place = np.array(arguments["pages"]), shape.starts[0] + 5
    page = np.asarray(arguments["page_table"])[0, place // shape.page_size]
    pages[0, page, place % shape.page_size, column] = np.nan
    out, group = plain(arguments | {"pages": pages}, shape)[0][0], shape.num_heads // shape.num_kv_heads
    assert np.isnan(out[5:, :group]).any(axis=-1).all()
    assert not np.isnan(out[:5]).any() and not np.isnan(out[:, group:]).any()


@pytest.mark.parametrize("of_value", [False, True])
def test_a_fault_in_8_bits_that_is_seen_shows(of_value):
    shape = NAMED["int8"]
    assert_fault_shows(plain(with_a_fault(example(shape), shape, of_value), shape)[0], shape)


@pytest.mark.parametrize("name", ["group_3", "window"])
def test_a_query_keeps_its_bits_wherever_the_chunk_is_cut(name):
    """Two halves give the bits of the whole, whoever shares the batch."""
    shape = dataclasses.replace(NAMED[name], chunk=40, starts=(300, 700))
    arguments = example(shape)
    whole, _ = plain(arguments, shape)
    q, starts = np.asarray(arguments["q"]), np.asarray(arguments["starts"])
    halves = [plain(arguments | {"q": q[:, at : at + 20], "starts": starts + at}, shape)[0] for at in (0, 20)]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)
    turned = {name: arguments[name][::-1] for name in ("q", "page_table", "starts")}
    np.testing.assert_array_equal(plain(arguments | turned, shape)[0][::-1], whole)


def test_pages_no_query_sees_are_not_copied():
    """Page ids past the pool stand before the window and after the chunk: to copy one raises."""
    shape = NAMED["window"]
    arguments = example(shape)
    table = np.array(arguments["page_table"])
    group = SMALL.ring.group
    for row, start in enumerate(shape.starts):
        table[row, : max(start - 50 + 1, 0) // (shape.page_size * group) * group] = 2 * table.size
        table[row, -(-(start + shape.chunk) // shape.page_size) :] = 2 * table.size
    got = strictly(KERNEL, arguments | {"page_table": table}, config=SMALL, **shape.settings)
    assert_equals_reference(got, arguments, shape)


def test_pages_that_are_not_listed_are_not_copied():
    """Nor does it matter how far a list is padded, or with what."""
    shape = dataclasses.replace(NAMED["sparse"], num_heads=2, num_kv_heads=1)
    arguments = example(shape)
    blocks, counts = (np.array(arguments[name]) for name in ("blocks", "counts"))
    table = np.array(arguments["page_table"])
    for row, count in enumerate(counts[:, 0]):
        table[row, np.setdiff1d(np.arange(shape.num_blocks), blocks[row, 0, :count])] = 2 * table.size
        blocks[row, 0, count:] = 3 * table.size
    got = strictly(KERNEL, arguments | {"page_table": table, "blocks": blocks}, config=SMALL, **shape.settings)
    assert_equals_reference(got, arguments, shape)


@pytest.mark.parametrize("name", ["window"])
def test_dense_is_listing_every_block(name):
    """Bit for bit, with block sums and without them."""
    shape = NAMED[name]
    arguments = example(shape)
    listed = listing_every_block(arguments, shape)
    asked, unasked = (dataclasses.replace(shape, block_lse=block_lse) for block_lse in (True, False))
    out, lse = plain(arguments, asked)
    listed_out, listed_lse = plain(listed, asked)
    for other in (listed_out, plain(arguments, unasked)[0], plain(listed, unasked)[0]):
        np.testing.assert_array_equal(as_bytes(other), as_bytes(out))
    np.testing.assert_array_equal(listed_lse, lse)


def shapes_of(shape: Shape):
    """The arguments of a shape, with no contents."""
    b, n, k = len(shape.starts), shape.num_blocks, shape.num_kv_heads
    arrays = {
        "q": jax.ShapeDtypeStruct((b, shape.chunk, shape.num_heads, shape.head_dim), shape.dtype),
        "pages": jax.ShapeDtypeStruct((k, 1 + b * n, shape.page_size, shape.width), shape.dtype),
        "page_table": jax.ShapeDtypeStruct((b, n), np.int32),
        "starts": jax.ShapeDtypeStruct((b,), np.int32),
        "softmax": shape.softmax(),
    }
    if shape.open_share is None:
        return arrays
    lists = {"blocks": jax.ShapeDtypeStruct((b, k, n), np.int32), "counts": jax.ShapeDtypeStruct((b, k), np.int32)}
    return arrays | lists


@pytest.mark.slow
def test_lowers_for_a_tpu(rung):
    chip_shapes = [shape for shape in SHAPES if not shape.tested]
    rung("paged_prefill tpu lowers", chip_shapes, 6, lambda shape: lower(KERNEL, shapes_of(shape), **shape.settings))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 4}, 'reads float32 pages of a multiple of 8 tokens, not 4: use "xla"'),
        ({"starts": (2_000_000,)}, 'bytes of scalar memory: use "xla", or pages of more than 16 tokens'),
        ({"page_size": 16384}, 'bytes of vector memory: use "xla", or smaller pages'),
        ({"starts": (400_000,), "block_lse": True}, 'bytes of vector memory: use "xla", or shorter lists'),
    ],
)
def test_what_it_cannot_serve_is_refused(change, reason):
    shape = dataclasses.replace(NAMED["sinks"], **change)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda arrays: KERNEL(**arrays, **shape.settings), shapes_of(shape))
