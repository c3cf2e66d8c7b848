"""The TPU kernels of the pass over page summaries, interpreted on a CPU and lowered for a TPU that is not here."""

from functools import partial

import jax
import numpy as np
import pytest
from absent_tpu import lower, strictly
from jax.experimental.pallas import tpu as pltpu
from test_block_scores import FUNCTIONS, NAMED, arguments_of, assert_close, poisoned, run

from et_jax.pallas import ring
from et_jax.pallas.block_scores import tpu
from et_jax.pallas.block_scores.shapes import SHAPES, TESTED, Shape, example
from et_jax.pallas.ring import RingConfig

# few buffers of few pages: lists go round the ring several times
SMALL = RingConfig(group=4, depth=3)
KERNELS = {"block": tpu.block_scores, "code": tpu.code_scores}
# A shape for each path: whole heads and heads beside others, empty rows, more than a row of lanes.
PATHS = {"block": ("heads_8", "group_3", "dim_96", "empty_slots"), "code": ("codes_group_3", "codes_dim_96")}


def kernel(name: str, shape: Shape, config: RingConfig | None = SMALL, **how):
    return partial(KERNELS[name], **shape.settings, config=config, **how)


def served(name: str, shapes: tuple[Shape, ...]) -> list[Shape]:
    """The shapes that a kernel does not refuse."""
    if name == "block":
        return list(shapes)
    return [shape for shape in shapes if shape.num_kv_heads == 4 or shape.num_kv_heads % 8 == 0]


def numbers(results):
    return [np.asarray(x, np.float64) for x in results]


def assert_right(name, results, arguments, shape: Shape):
    assert_close(numbers(results), run(name, arguments, shape, "reference"))


@pytest.mark.parametrize(("name", "count"), [("block", 20), ("code", 7)])
def test_equals_reference(name, count, capsys):
    shapes = served(name, TESTED)
    for shape in shapes:
        arguments = example(shape)
        score = kernel(name, shape, interpret=True)
        results = jax.jit(lambda arrays, score=score: score(**arrays))(arguments_of(name, arguments))
        assert_right(name, results, arguments, shape)
    with capsys.disabled():
        print(f"\n{name}_scores tpu = reference: {len(shapes)} shapes")
    assert len(shapes) == count


@pytest.mark.parametrize("name", KERNELS)
def test_has_no_race(name, capsys):
    for case in PATHS[name]:
        shape = NAMED[case]
        arguments = poisoned(example(shape), shape)
        assert_right(name, strictly(kernel(name, shape), arguments_of(name, arguments)), arguments, shape)
    with capsys.disabled():
        print(f"\n{name}_scores tpu without races: {len(PATHS[name])} shapes")


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_has_no_race_in_any_shape(name):
    for shape in served(name, TESTED):
        arguments = poisoned(example(shape), shape)
        for config in (SMALL, None):
            results = strictly(kernel(name, shape, config), arguments_of(name, arguments))
            assert_right(name, results, arguments, shape)


@pytest.mark.parametrize("name", KERNELS)
def test_pages_that_hold_no_block_are_not_copied(name):
    """Page ids past the pool stand at every block past the length: to copy one raises."""
    shape = NAMED["codes_group_3"]
    arguments = example(shape)
    table = np.array(arguments["page_table"])
    past = np.arange(table.shape[1]) * shape.page_size >= np.asarray(shape.lengths)[:, None]
    faulty = arguments | {"page_table": np.where(past, 2 * table.size, table).astype(np.int32)}
    assert_right(name, strictly(kernel(name, shape), arguments_of(name, faulty)), arguments, shape)


class Broken:
    """A copy with something wrong in it."""

    def __init__(self, copy, start=None, wait=None):
        self.start, self.wait = start or copy.start, wait or copy.wait


def assert_caught(name: str):
    """The kernel races or is wrong."""
    shape = NAMED["codes_group_3"]
    arguments = example(shape)
    with pytest.raises(AssertionError):
        assert_right(name, strictly(kernel(name, shape), arguments_of(name, arguments)), arguments, shape)


@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_wait_is_found(name, monkeypatch):
    copy = pltpu.make_async_copy
    monkeypatch.setattr(ring.pltpu, "make_async_copy", lambda *refs: Broken(copy(*refs), wait=lambda: None))
    assert_caught(name)


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_page_is_found(name, monkeypatch):
    copy = pltpu.make_async_copy
    monkeypatch.setattr(
        ring.pltpu,
        "make_async_copy",
        lambda source, *refs: Broken(copy(source, *refs), start=copy(source.ref.at[0, 1], *refs).start),
    )
    assert_caught(name)


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
    return {key: jax.ShapeDtypeStruct(*arrays[key]) for key in FUNCTIONS[name][1]}


@pytest.mark.parametrize(("name", "count"), [("block", 4), ("code", 2)])
def test_lowers_for_a_tpu(name, count, capsys):
    shapes = served(name, tuple(shape for shape in SHAPES if not shape.tested))
    for shape in shapes:
        lower(kernel(name, shape, config=None), shapes_of(name, shape))
    with capsys.disabled():
        print(f"\n{name}_scores tpu lowers: {len(shapes)} shapes")
    assert len(shapes) == count


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
