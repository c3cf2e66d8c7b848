"""The TPU kernel of decode attention, interpreted on a CPU and lowered for a TPU that is not here."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from absent_tpu import lower, strictly
from jax.experimental.pallas import tpu as pltpu
from test_paged_attention import NAMED, assert_close, poisoned, run

from et_jax.pallas import ring
from et_jax.pallas.paged_attention import tpu
from et_jax.pallas.paged_attention.shapes import SHAPES, TESTED, Shape, example
from et_jax.pallas.ring import RingConfig

SERVED = [shape for shape in TESTED if not (shape.int8 and shape.page_size % 32)]
# the others take as long, and what they vary others vary too: see the slow test
BREADTH = [
    shape
    for shape in SERVED
    if not shape.name.startswith("hopper") and shape.name not in ("group_2", "page_32", "whole_pages", "int8_page_64")
]
# few buffers of few pages: lists go round the ring several times
SMALL = RingConfig(group=4, depth=3)
# A shape for each path: whole heads and heads beside their values, with and without padding columns; lists in order
# and with gaps, empty ones; what changes the scores; both dtypes; an 8-bit pool.
PATHS = ("dim_128_bfloat16", "group_3", "dim_96", "empty_slots", "window", "all_of_them", "int8_bfloat16")


def kernel(shape: Shape, config: RingConfig | None = SMALL, **how):
    return partial(tpu.paged_attention, **shape.settings, config=config, **how)


def numbers(results):
    return [np.asarray(x, np.float64) for x in results]


def plain(arguments, shape: Shape):
    """Attention and block sums as float64 numpy, interpreted without checks."""
    attend = kernel(shape, interpret=True)
    return numbers(jax.jit(lambda arrays: attend(**arrays))(arguments))


def test_equals_reference(capsys):
    for shape in BREADTH:
        arguments = example(shape)
        assert_close(plain(arguments, shape), run(arguments, shape, "reference"), shape.dtype)
    with capsys.disabled():
        print(f"\npaged_attention tpu = reference: {len(BREADTH)} shapes")
    assert len(BREADTH) == 28


def test_has_no_race(capsys):
    for name in PATHS:
        shape = NAMED[name]
        arguments = poisoned(example(shape), shape)
        results = numbers(strictly(kernel(shape), arguments))
        assert_close(results, run(arguments, shape, "reference"), shape.dtype)
    with capsys.disabled():
        print(f"\npaged_attention tpu without races: {len(PATHS)} shapes")
    assert len(PATHS) == 7


@pytest.mark.slow
def test_has_no_race_in_any_shape(capsys):
    for shape in SERVED:
        arguments = poisoned(example(shape), shape)
        for config in (SMALL, None):
            results = numbers(strictly(kernel(shape, config), arguments))
            assert_close(results, run(arguments, shape, "reference"), shape.dtype)
    with capsys.disabled():
        print(f"\npaged_attention tpu without races: {len(SERVED)} shapes, two rings")
    assert len(SERVED) == 47


def test_nothing_listed_gives_zero_and_minus_infinity():
    shape = NAMED["sinks"]
    arguments = example(shape)
    arguments["counts"] = np.zeros(arguments["counts"].shape, np.int32)
    out, block_lse = strictly(kernel(shape), arguments)
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
    results = numbers(strictly(kernel(shape), arguments | {"page_table": table, "blocks": blocks}))
    assert_close(results, run(arguments, shape, "reference"), shape.dtype)


def test_a_row_keeps_its_bits_in_any_company():
    """Lists emptied around it, cut short, in another order of slots: a row's output is the same, bit for bit."""
    shape = NAMED["window"]
    arguments: dict[str, Any] = {key: None if x is None else np.array(x) for key, x in example(shape).items()}
    results = plain(arguments, shape)
    alone = arguments | {"counts": arguments["counts"] * (np.arange(3)[:, None] == 0).astype(np.int32)}
    turned = {key: x if x is None or key == "pages" else x[::-1] for key, x in arguments.items()}
    wider = arguments | {"blocks": np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 131)), constant_values=7)}
    for case, place in ((alone, 0), (turned, 2), (wider, 0)):
        for got, wanted in zip(plain(case, shape), results, strict=True):
            np.testing.assert_array_equal(got[place][..., : wanted.shape[2]], wanted[0])


class Broken:
    """A copy with something wrong in it."""

    def __init__(self, copy, start=None, wait=None):
        self.start, self.wait = start or copy.start, wait or copy.wait


def assert_caught(arguments, shape: Shape):
    """The kernel races or is wrong."""
    with pytest.raises(AssertionError):
        assert_close(numbers(strictly(kernel(shape), arguments)), run(arguments, shape, "reference"), shape.dtype)


def test_a_missing_wait_is_found(monkeypatch):
    copy = pltpu.make_async_copy
    monkeypatch.setattr(ring.pltpu, "make_async_copy", lambda *refs: Broken(copy(*refs), wait=lambda: None))
    assert_caught(example(NAMED["group_3"]), NAMED["group_3"])


def test_a_wrong_page_is_found(monkeypatch):
    copy = pltpu.make_async_copy
    monkeypatch.setattr(
        ring.pltpu,
        "make_async_copy",
        lambda source, *refs: Broken(copy(source, *refs), start=copy(source.ref.at[0, 1], *refs).start),
    )
    assert_caught(example(NAMED["group_3"]), NAMED["group_3"])


def test_a_buffer_written_too_early_is_found(monkeypatch):
    """Every copy that runs ahead lands in the buffer that is being worked on."""
    monkeypatch.setattr(ring.Ring, "buffer", lambda self, i: (self.first_ref[0] + i) % (self.depth - 1))
    assert_caught(example(NAMED["group_3"]), NAMED["group_3"])


def test_a_page_past_the_pool_is_found():
    shape = NAMED["group_3"]
    arguments = example(shape)
    with pytest.raises(Exception, match=r"[Oo]ut.of.bounds"):
        strictly(kernel(shape), arguments | {"page_table": arguments["page_table"] + 10_000})


def shapes_of(shape: Shape):
    """The arguments of a shape, with no contents."""
    b, n, k = len(shape.lengths), shape.num_blocks, shape.num_kv_heads
    listed = jax.ShapeDtypeStruct((b, k, n), np.int32)
    pool = (k, 1 + b * n, shape.page_size, shape.width)
    return {
        "q": jax.ShapeDtypeStruct((b, shape.num_heads, shape.head_dim), shape.dtype),
        "pages": jax.ShapeDtypeStruct(pool, np.int8 if shape.int8 else shape.dtype),
        "kv_scales": jax.ShapeDtypeStruct((*pool[:2], 2), np.float32) if shape.int8 else None,
        "page_table": jax.ShapeDtypeStruct((b, n), np.int32),
        "blocks": listed,
        "counts": jax.ShapeDtypeStruct(listed.shape[:2], np.int32),
        "lengths": jax.ShapeDtypeStruct((b,), np.int32),
    }


def test_lowers_for_a_tpu(capsys):
    chip_shapes = [shape for shape in SHAPES if not shape.tested]
    for shape in chip_shapes:
        lower(kernel(shape, config=None), shapes_of(shape))
    with capsys.disabled():
        print(f"\npaged_attention tpu lowers: {len(chip_shapes)} shapes")
    assert len(chip_shapes) == 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 16, "int8": True}, 'reads int8 pages of a multiple of 32 tokens, not 16: use "xla"'),
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
        jax.eval_shape(lambda arrays: tpu.paged_attention(**arrays, **shape.settings), shapes_of(shape))
