"""The definitions and the XLA programs of every operation: equal to their formulas, and to themselves bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ATTENTION, CODE, OPERATIONS, PREFILL
from ladder import as_bytes, compiled, results

from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.checks import wider
from et_jax.pallas.paged_attention import xla

# What the shapes for Hopper vary beside the others is nothing to XLA.
SHAPES = [
    pytest.param(operation, shape, id=f"{operation.name}-{name}")
    for operation in OPERATIONS
    for name, shape in operation.shapes.items()
    if shape.tested and not (name.startswith("hopper") and operation in (ATTENTION, PREFILL))
]


@pytest.mark.parametrize(("operation", "shape"), SHAPES)
def test_the_definition_is_its_formula_and_xla_the_definition_whatever_stands_where_nothing_is_read(operation, shape):
    arguments = operation.example(shape)
    given = operation.poisoned(arguments, shape)
    defined, got = (
        results(operation.function, given, backend=backend, **shape.settings) for backend in ("reference", "xla")
    )
    operation.assert_close(defined, operation.formula(arguments, shape), shape)
    operation.assert_close(got, defined, shape)


@pytest.mark.parametrize(
    "name", ["group_3", "page_64", "sparse", "window", "all_of_them_bfloat16", "int8", "rows_5", "rows_apart"]
)
def test_a_list_of_several_rounds_is_read_to_its_end(name):
    """Of pieces of one block, so that a round ends within the lists."""
    shape = ATTENTION.shapes[name]
    arguments = ATTENTION.example(shape)
    dtype = wider(arguments["q"].dtype, *([] if shape.in_8_bits else [arguments["pages"].dtype]))
    rule = xla.heuristic(shape.page_size, shape.head_dim, dtype, "cpu", shape.rows)
    config = dataclasses.replace(rule, group=1, pieces=5)
    given = ATTENTION.poisoned(arguments, shape)
    got = results(xla.paged_attention, given, config=config, **shape.settings)
    expected = results(ATTENTION.function, arguments, backend="reference", **shape.settings)
    ATTENTION.assert_close(got, expected, shape)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_queries_of_a_chunk_before_all_that_is_listed_give_zero_and_minus_infinity(backend):
    shape = PREFILL.shapes["block_sums"]
    ones = jnp.ones((2, shape.num_kv_heads, shape.num_blocks), jnp.int32)
    given = PREFILL.example(shape) | {"blocks": ones, "counts": ones[..., 0]}
    out, lse = results(PREFILL.function, given, backend=backend, block_lse=True)
    assert not out[1, :32].any() and np.isneginf(lse[1, :32]).all()
    assert out[1, 32:].all() and np.isfinite(lse[1, 32:, :, 0]).all()


# The bits of a row.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_row_do_not_depend_on_how_many_pieces_a_step_takes(dtype):
    """Lists of all lengths, an empty one among them."""
    lengths = (40, 0, 7, 161, 16, 90, 33, 1, 200, 64, 17)
    shape = dataclasses.replace(ATTENTION.shapes["group_3"], dtype=dtype, lengths=lengths, open_share=0.7)
    arguments = ATTENTION.example(shape)
    rule = dataclasses.replace(xla.heuristic(shape.page_size, shape.head_dim, jnp.dtype(dtype), "cpu"), group=2)
    expected, *others = (
        results(xla.paged_attention, arguments, config=dataclasses.replace(rule, pieces=pieces))
        for pieces in (None, 1, 4, 12)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, expected)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("float32", (1, 2)), ("float32", (4, 1)), ("bfloat16", (3, 3)), ("bfloat16", (4, 1))],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype, heads):
    """Beside rows as long, beside rows whose lists are empty, where it is walked alone; however lists are padded.

    NaN in the pages of other rows does not reach it.
    """
    kv_heads, group = heads
    sizes = {"num_kv_heads": kv_heads, "num_heads": kv_heads * group, "lengths": (200,) * 8}
    arguments = ATTENTION.example(dataclasses.replace(ATTENTION.shapes["group_3"], dtype=dtype, **sizes))
    only = (np.arange(8) == 1).astype(np.int32)
    faulty = np.array(arguments["pages"])
    faulty[:, np.delete(np.asarray(arguments["page_table"]), 1, axis=0)] = np.nan
    m = arguments["blocks"].shape[2]
    expected, *others = (
        as_bytes(results(ATTENTION.function, arguments | change, backend="xla"))
        for change in (
            {},
            {"counts": arguments["counts"] * only[:, None], "lengths": arguments["lengths"] * only},
            {"pages": faulty},
            {"blocks": np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 41)), constant_values=7)},
        )
    )
    for out, block_lse in others:
        np.testing.assert_array_equal(out[1], expected[0][1])
        np.testing.assert_array_equal(block_lse[1][:, : 4 * m], expected[1][1])


@pytest.mark.parametrize("name", ["ragged", "all_of_them_bfloat16"])
def test_a_row_of_a_chunk_does_not_depend_on_how_long_the_loop_runs(name):
    """A neighbour far ahead, at the beginning or NaN leaves a row's bits as they are."""
    shape = dataclasses.replace(PREFILL.shapes[name], starts=(300, 900))
    arguments = jax.tree.map(np.array, PREFILL.example(shape))
    faulty = arguments["pages"].copy()
    faulty[:, arguments["page_table"][1]] = np.nan
    expected, *others = (
        as_bytes(results(PREFILL.function, arguments | change, backend="xla")[0])
        for change in ({}, {"starts": np.array([300, 0], np.int32)}, {"pages": faulty})
    )
    for out in others:
        np.testing.assert_array_equal(out[0], expected[0])


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("function", [block_scores, code_scores])
def test_the_scores_of_a_row_have_the_same_bits_alone_and_beside_others(function, heads):
    """Beside rows that are empty, and beside rows as long, of which one is NaN."""
    kv_heads, group = heads
    sizes = {"num_kv_heads": kv_heads, "num_heads": kv_heads * group, "lengths": (60,) * 16}
    shape = dataclasses.replace(CODE.shapes["group_4"], **sizes)
    arguments = CODE.example(shape)
    only = (jnp.arange(16) == 2).astype(jnp.int32)
    expected, *others = (
        results(function, arguments | change, backend="xla", **shape.settings)
        for change in ({}, {"lengths": arguments["lengths"] * only}, {"q": arguments["q"].at[3].set(jnp.nan)})
    )
    for got, wanted in ((got, wanted) for other in others for got, wanted in zip(other, expected, strict=True)):
        np.testing.assert_array_equal(got[2], wanted[2])


# The programs.


def test_the_number_of_steps_is_read_from_the_counts_and_the_starts():
    """A step count known to the compiler would be that of the list or the table, however little is listed or held.

    Lists have rounds, whose pieces are read several at a time, then singly, and then merged.
    """

    def text(operation, shape) -> str:
        lowered = compiled(operation.function, backend="xla", **shape.settings).lower(operation.example(shape))
        return lowered.compile().as_text() or ""

    shape = ATTENTION.shapes["group_3"]
    found = text(ATTENTION, shape)
    assert found.count(" while(") == 4 and "known_trip_count" not in found
    for name, most in (("group_3", 0), ("listed", 1)):  # over the lists
        found = text(PREFILL, PREFILL.shapes[name])
        assert found.count(" while(") > most and found.count("known_trip_count") <= most
