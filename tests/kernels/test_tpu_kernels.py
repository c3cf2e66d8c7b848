"""The TPU kernels, interpreted on a CPU with a detector of races and lowered for a TPU that is not here."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from cases import ATTENTION, BLOCK, CODE, OPERATIONS, PREFILL, each, kernel
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from ladder import TPU, compiled, results, taken

from et_jax.pallas import ring
from et_jax.pallas.checks import code_rows
from et_jax.pallas.paged_attention import tpu as attention
from et_jax.pallas.paged_prefill import tpu as prefill
from et_jax.pallas.ring import RingConfig

STRICT = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
)
# few buffers of few pages, and several tiles a chunk: lists go round the ring several times
RING = RingConfig(group=4, depth=3)
# A shape for each path: whole heads and heads beside their values, with and without padding columns; lists in order
# and with gaps, empty ones; rows far apart; what changes the scores; both dtypes; pools in 8 bits; several rows a slot;
# more blocks than a row of lanes.
PATHS = {
    "paged_attention": [
        *("dim_128_bfloat16", "group_3", "dim_96", "empty_slots", "window", "all_of_them", "int8_bfloat16"),
        *("fp8_dim_96", "rows_5", "rows_all_of_them", "rows_int8", "group_8", "sinks", "rows_3", "sparse_wide"),
    ],
    "paged_prefill": [
        *("dim_128", "group_4_bfloat16", "dim_96", "ragged", "all_of_them", "sparse_all_of_them", "int8_all_of_them"),
        *("fp8_dim_96", "group_16", "one_query", "sinks", "int8"),
    ],
    "block_scores": [
        *("heads_8", "group_3", "dim_96", "empty_slots", "group_1", "dim_256", "page_128", "one_token", "spare"),
        "many_blocks",
    ],
    "code_scores": ["codes_group_3", "codes_dim_96", "group_8", "dim_256", "page_128", "codes_many_blocks"],
}
SMALL: dict[str, Any] = dict.fromkeys(PATHS, RING) | {"paged_prefill": prefill.Config(tile=16, ring=RING)}
# Raced with every run; the others by the slow tests.
QUICK = {"empty_slots", "rows_all_of_them", "sparse_all_of_them", "int8", "codes_group_3"}
# Lists that fill several groups of the ring that is served.
SEVERAL_GROUPS = {
    "paged_attention": ["sparse", "hopper_int8_all_of_them", "hopper_rows_all_of_them"],
    "paged_prefill": ["sparse", "page_128", "hopper_int8"],
    "block_scores": ["many_blocks"],
    "code_scores": ["codes_many_blocks"],
}


def is_right(operation, shape, arguments, config: Any) -> None:
    """Equal to the definition and without a race, where copies run late and memory starts as NaN."""
    pltpu.reset_tpu_interpret_mode_state()  # a kernel that failed leaves its memory behind
    got = results(kernel(operation, "tpu"), arguments, config=config, interpret=STRICT, **shape.settings)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    expected = results(operation.function, operation.example(shape), backend="reference", **shape.settings)
    operation.assert_close(got, expected, shape)


@each(PATHS, QUICK)
def test_is_the_definition_without_races_whatever_stands_where_nothing_is_read(operation, shape):
    is_right(operation, shape, operation.poisoned(operation.example(shape), shape), SMALL[operation.name])


@each(SEVERAL_GROUPS)
def test_has_no_race_in_the_ring_that_is_served(operation, shape):
    is_right(operation, shape, operation.poisoned(operation.example(shape), shape), None)


def plain(operation, arguments, shape, **more):
    """What a kernel returns, interpreted without checks."""
    config = SMALL[operation.name]
    return results(kernel(operation, "tpu"), arguments, config=config, interpret=True, **shape.settings, **more)


def without_pages_past_the_length(shape, arguments):
    table = np.array(arguments["page_table"])
    past = np.arange(table.shape[1]) * shape.page_size >= np.asarray(shape.lengths)[:, None]
    return arguments | {"page_table": np.where(past, 2 * table.size, table).astype(np.int32)}


def without_unlisted_pages(shape, arguments):
    """Nor does it matter with what a list is padded."""
    table, blocks, counts = (np.array(arguments[name]) for name in ("page_table", "blocks", "counts"))
    read = np.zeros(table.shape, bool)
    for row, head in np.ndindex(*counts.shape):
        read[row, blocks[row, head, : counts[row, head]]] = True
    table[~read] = 2 * table.size
    blocks[np.arange(blocks.shape[2]) >= counts[..., None]] = 3 * table.size
    return arguments | {"page_table": table, "blocks": blocks}


def without_pages_out_of_sight(shape, arguments):
    """Before the window by whole groups of the ring, and after the chunk."""
    table = np.array(arguments["page_table"])
    for row, start in enumerate(shape.starts):
        before = max(start - shape.window + 1, 0) // (shape.page_size * RING.group) * RING.group
        table[row, :before] = 2 * table.size
        table[row, -(-(start + shape.chunk) // shape.page_size) :] = 2 * table.size
    return arguments | {"page_table": table}


@pytest.mark.parametrize(
    ("operation", "name", "without"),
    [
        (ATTENTION, "sparse", without_unlisted_pages),
        (PREFILL, "sparse", without_unlisted_pages),
        (PREFILL, "window", without_pages_out_of_sight),
        (BLOCK, "codes_group_3", without_pages_past_the_length),
        (CODE, "codes_group_3", without_pages_past_the_length),
    ],
    ids=lambda each: getattr(each, "name", None) or getattr(each, "__name__", None),
)
def test_pages_that_no_query_reads_are_not_copied(operation, name, without):
    """Page ids past the pool stand for them: to copy one raises."""
    shape = operation.shapes[name]
    if name == "sparse":  # of one KV head, so that every page is listed by all heads or by none
        shape = dataclasses.replace(shape, num_heads=2, num_kv_heads=1)
    is_right(operation, shape, without(shape, operation.example(shape)), SMALL[operation.name])


@pytest.mark.parametrize("name", ["group_3", "window"])
def test_a_query_keeps_its_bits_wherever_the_chunk_is_cut(name):
    """Two halves give the bits of the whole, in any batch."""
    shape = dataclasses.replace(PREFILL.shapes[name], chunk=40, starts=(100, 300))
    arguments = PREFILL.example(shape)
    whole, _ = plain(PREFILL, arguments, shape)
    q, starts = np.asarray(arguments["q"]), np.asarray(arguments["starts"])
    cut = [arguments | {"q": q[:, at : at + 20], "starts": starts + at} for at in (0, 20)]
    halves = [plain(PREFILL, half, shape)[0] for half in cut]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)
    turned = {name: arguments[name][::-1] for name in ("q", "page_table", "starts")}
    np.testing.assert_array_equal(plain(PREFILL, arguments | turned, shape)[0][::-1], whole)


def test_more_rows_than_fit_are_read_in_parts(monkeypatch):
    shape = ATTENTION.shapes["rows_apart"]
    arguments = ATTENTION.example(shape)
    expected = results(ATTENTION.function, arguments, backend="reference", **shape.settings)
    together = []
    split = attention.split
    monkeypatch.setattr(
        attention,
        "split",
        lambda every, rows, *lists, **more: together.append(rows) or split(every, rows, *lists, **more),
    )
    for rows in (4, 2):
        sizes = 2, shape.num_heads, shape.num_blocks, arguments["blocks"].shape[2], rows
        needed = attention.footprint(RING, arguments["pages"], *sizes, read_apart=True).vector
        monkeypatch.setattr(ring, "VECTOR_MEMORY_BYTES", needed)
        compiled.cache_clear()
        ATTENTION.assert_close(plain(ATTENTION, arguments, shape), expected, shape)
    assert together == [4, 2]
    compiled.cache_clear()


# What the interpreter finds.


class Unawaited:
    """A copy that nothing waits for."""

    def __init__(self, copy):
        self.start, self.wait = copy.start, lambda: None


def test_a_missing_wait_is_found(monkeypatch):
    copy, shape = pltpu.make_async_copy, ATTENTION.shapes["group_3"]
    compiled.cache_clear()
    monkeypatch.setattr(ring.pltpu, "make_async_copy", lambda *refs: Unawaited(copy(*refs)))
    with pytest.raises(AssertionError):
        is_right(ATTENTION, shape, ATTENTION.example(shape), RING)
    compiled.cache_clear()


# What is compiled for a chip; nothing of the arguments is drawn.


def shapes_of(operation, shape, backend: str = "tpu") -> dict[str, Any]:
    """The arguments' shapes and dtypes."""
    b, n, k = len(getattr(shape, "lengths", ()) or shape.starts), shape.num_blocks, shape.num_kv_heads
    pages, heads, d = 1 + b * n, shape.num_heads, shape.head_dim
    in_8_bits, rows = getattr(shape, "in_8_bits", None), getattr(shape, "rows", 1)
    queries = (b, shape.chunk, heads, d) if operation is PREFILL else (b * rows, heads, d)
    arrays = {
        "q": (queries, shape.dtype),
        "pages": ((k, pages, shape.page_size, shape.width), in_8_bits or shape.dtype),
        "kv_scales": ((k, pages, 2, shape.page_size), np.float32) if in_8_bits else None,
        "page_table": ((b, n), np.int32),
        "blocks": ((b, k, n), np.int32) if getattr(shape, "open_share", None) is not None else None,
        "counts": ((b, k), np.int32) if getattr(shape, "open_share", None) is not None else None,
        "readers": ((b, k, n), np.int32) if getattr(shape, "read_apart", False) else None,
        "lengths": ((b * rows,), np.int32),
        "starts": ((b,), np.int32),
        "key_box": ((k, pages, shape.width), shape.dtype),
        "mean": ((k, pages, shape.width), np.float32),
        "key_codes": ((k, pages, *code_rows(shape.page_size, d)), np.int8),
    }
    found = {name: x and jax.ShapeDtypeStruct(*x) for name, x in arrays.items()}
    softmax = {"softmax": shape.softmax()} if operation in (ATTENTION, PREFILL) else {}
    return taken(kernel(operation, backend), found | softmax)


CHIP_SHAPES = {
    operation.name: [name for name, shape in operation.shapes.items() if not shape.tested] for operation in OPERATIONS
}


@each(CHIP_SHAPES)
def test_lowers_for_a_tpu(operation, shape):
    """With nothing but jaxlib."""
    program = compiled(kernel(operation, "tpu"), **shape.settings)
    with jax.sharding.use_abstract_mesh(TPU):
        exported = jax.export.export(program, platforms=["tpu"])(shapes_of(operation, shape))
    assert "tpu_custom_call" in exported.mlir_module()
