"""Laws of decode attention over pages."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from ladder import TOLERANCE, as_bytes, assert_attention_close, compiled, numbers, results, with_nan_unseen

from et_jax.pallas.paged_attention import paged_attention, xla
from et_jax.softmax import Softmax
from scripts.measuring.kernel_shapes.paged_attention import SHAPES, TESTED, Shape, example

NAMED = {shape.name: shape for shape in SHAPES}
# What the shapes for Hopper vary beside the others is nothing to XLA; a slow test has the definition of these.
HOPPER = [shape for shape in TESTED if shape.name.startswith("hopper")]
PLAIN = [shape for shape in TESTED if shape not in HOPPER]
SOFTMAX = Softmax(scale=1.0)


def run(arguments, backend: str, **settings):
    """Attention and block sums as float64 numpy, by a backend."""
    return numbers(results(paged_attention, arguments, backend=backend, **settings))


def bits(arguments):
    """Attention and block sums as bytes."""
    return as_bytes(results(paged_attention, arguments, backend="xla"))


def assert_equals_reference(got, arguments, shape: Shape):
    assert_attention_close(got, run(arguments, "reference", **shape.settings), shape.dtype)


def dense_float64(arguments, shape: Shape):
    """The formula of the docstring, block by block, in float64 numpy."""
    arrays, sinks = numbers(arguments), arguments["softmax"].sink_logits
    table, blocks, counts = (np.asarray(arguments[name]) for name in ("page_table", "blocks", "counts"))
    b, h, d = arrays["q"].shape
    group, s = h // shape.num_kv_heads, shape.page_size
    out, block_lse = np.zeros((b, h, d)), np.full((b, h, blocks.shape[2]), -np.inf)
    for row, head in np.ndindex(b, h):
        kv_head, length, slot = head // group, shape.row_lengths[row], row // shape.rows
        mixed, total = np.zeros(d), 0.0 if sinks is None else np.exp(np.float64(sinks[head]))
        for entry, block in enumerate(blocks[slot, kv_head, : counts[slot, kv_head]]):
            if shape.read_apart and not arguments["readers"][slot, kv_head, entry] >> row % shape.rows & 1:
                continue
            page = table[slot, block]
            behind = length - 1 - (block * s + np.arange(s))
            seen = (behind >= 0) & (behind < (shape.window or length))
            token = arrays["pages"][kv_head, page, seen]
            if arrays["kv_scales"] is not None:
                token = token * np.repeat(arrays["kv_scales"][kv_head, page][:, seen].T, [d, shape.width - d], axis=1)
            z = d**-0.5 * (token[:, :d] @ arrays["q"][row, head])
            if shape.soft_cap is not None:
                z = shape.soft_cap * np.tanh(z / shape.soft_cap)
            mixed += np.exp(z) @ token[:, d : 2 * d]
            total += np.exp(z).sum()
            if seen.any():
                block_lse[row, head, entry] = np.log(np.exp(z).sum())
        out[row, head] = mixed / total if total else 0.0
    return out, block_lse


def reference_is_right(shape: Shape):
    arguments = example(shape)
    assert_attention_close(run(arguments, "reference", **shape.settings), dense_float64(arguments, shape), shape.dtype)


MIXED = [("float32", "bfloat16"), ("bfloat16", "float32")]


def of_two_dtypes(arguments, queries: str, pages: str):
    """The same with queries and pages of these dtypes."""
    return arguments | {"q": arguments["q"].astype(queries), "pages": arguments["pages"].astype(pages)}


@pytest.mark.parametrize("dtypes", MIXED)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(dtypes):
    shape = dataclasses.replace(NAMED["group_2"], dtype=dtypes[0])
    arguments = of_two_dtypes(example(shape), *dtypes)
    assert_equals_reference(run(arguments, "xla", **shape.settings), arguments, shape)


def test_reference_equals_the_formula(rung):
    rung("paged_attention reference = formula", PLAIN, 41, reference_is_right)


@pytest.mark.slow
def test_reference_equals_the_formula_in_the_shapes_for_hopper(rung):
    rung("paged_attention reference = formula, for Hopper", HOPPER, 19, reference_is_right)


def xla_is_right(shape: Shape):
    arguments = example(shape)
    assert_equals_reference(run(arguments, "xla", **shape.settings), arguments, shape)


def test_xla_equals_reference(rung):
    rung("paged_attention xla = reference", PLAIN, 41, xla_is_right)


FAR = ("group_3", "page_64", "sparse", "window", "all_of_them_bfloat16", "int8", "rows_5", "rows_apart")


@pytest.fixture
def read_in_lanes(monkeypatch):
    """As if lists were long from their first group on."""
    monkeypatch.setattr(xla, "NEAR_TOKENS", 1)
    monkeypatch.setattr(xla, "FAR_TOKENS", 32)


@pytest.mark.usefixtures("read_in_lanes")
def test_what_lies_far_behind_in_a_list_is_read_in_lanes(rung):
    rung("paged_attention xla in lanes = reference", [NAMED[name] for name in FAR], 8, xla_is_right)


def poisoned(arguments, shape: Shape):
    """The same pool with NaN out of every query's sight: null page, unlisted pages, tails, padding columns."""
    seen = np.zeros(arguments["pages"].shape[:3], bool)
    table, blocks, counts = (np.asarray(arguments[name]) for name in ("page_table", "blocks", "counts"))
    for row, length in enumerate(shape.row_lengths):
        slot = row // shape.rows
        for head in range(shape.num_kv_heads):
            for block in blocks[slot, head, : counts[slot, head]]:
                position = block * shape.page_size + np.arange(shape.page_size)
                first = 0 if shape.window is None else length - shape.window
                seen[head, table[slot, block]] |= (position < length) & (position >= first)
    return with_nan_unseen(arguments, seen, 2 * shape.head_dim)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(
    "name",
    [
        "dim_96",
        "dim_256",
        "empty_slots",
        "all_empty",
        "window",
        "all_of_them",
        "sparse_bfloat16",
        "int8",
        "fp8_page_64",
        "rows_5",
        "rows_all_of_them",
        "rows_int8",
    ],
)
def test_what_is_not_seen_may_be_nan(name, backend):
    shape = NAMED[name]
    arguments = example(shape)
    clean, dirty = (run(case, backend, **shape.settings) for case in (arguments, poisoned(arguments, shape)))
    for got, expected in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_nothing_seen_gives_zero_and_minus_infinity(backend):
    for name in ("all_empty", "sinks", "group_4"):
        shape = NAMED[name]
        arguments = example(shape)
        arguments["counts"] = np.zeros(arguments["counts"].shape, np.int32)
        out, block_lse = run(arguments, backend)
        assert (out == 0).all() and (block_lse == -np.inf).all()


def test_a_block_behind_the_window_is_empty():
    shape = NAMED["window"]
    _, block_lse = run(example(shape), "xla")
    blocks_behind = (300 - 50) // 16
    assert (block_lse[0, :, :blocks_behind] == -np.inf).all()
    assert np.isfinite(block_lse[0, :, blocks_behind : -(-300 // 16)]).all()


@pytest.mark.parametrize("name", ["group_3", "sparse", "window", "dim_256", "page_64"])
def test_block_sums_add_up_to_attention(name):
    """Attention to each block alone, weighted by its share of the total, is attention to all."""
    shape = NAMED[name]
    arguments = example(shape)
    out, block_lse = run(arguments, "xla")
    alone = np.zeros(out.shape)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(block_lse).sum(-1))
    for entry in range(block_lse.shape[2]):
        single = arguments | {
            "blocks": np.asarray(arguments["blocks"])[:, :, entry : entry + 1],
            "counts": (entry < np.asarray(arguments["counts"])).astype(np.int32),
        }
        part, lse = run(single, "xla")
        np.testing.assert_array_equal(lse[..., 0], block_lse[..., entry])
        alone += np.exp(lse - total[..., None]) * part
    np.testing.assert_allclose(alone, out, atol=2 * TOLERANCE[shape.dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_walked_in_tiles_have_the_bits_of_rows_walked_at_once(dtype):
    """Lists of all lengths, an empty one among them, in tiles that divide the rows and tiles that do not."""
    lengths = (40, 0, 7, 161, 16, 90, 33, 1, 200, 64, 17)
    shape = dataclasses.replace(NAMED["group_3"], dtype=dtype, lengths=lengths, open_share=0.7)
    arguments = example(shape)
    rule = dataclasses.replace(xla.heuristic(shape.page_size, shape.head_dim, jnp.dtype(dtype), "cpu"), group=2)

    def walked(rows: int | None):
        config = dataclasses.replace(rule, rows=rows)
        return results(xla.paged_attention, arguments, config=config)

    expected = walked(None)
    for rows in (1, 4, 12):
        for got, wanted in zip(walked(rows), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("float32", (1, 2)), ("float32", (4, 1)), ("bfloat16", (1, 7)), ("bfloat16", (3, 3)), ("bfloat16", (4, 1))],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype, heads):
    """Beside rows whose lists are empty it is walked alone, beside rows as long not."""
    kv_heads, group = heads
    shape = dataclasses.replace(
        NAMED["group_3"], dtype=dtype, num_kv_heads=kv_heads, num_heads=kv_heads * group, lengths=(200,) * 8
    )
    arguments = example(shape)
    beside = results(paged_attention, arguments, backend="xla")
    only = (np.arange(8) == 1).astype(np.int32)
    empty = {"counts": arguments["counts"] * only[:, None], "lengths": arguments["lengths"] * only}
    alone = results(paged_attention, arguments | empty, backend="xla")
    for got, wanted in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(got[1], wanted[1])


@pytest.mark.parametrize("name", ["group_3", "dim_128_bfloat16", "all_of_them", "one_token", "sparse_wide"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    """Longer, emptied or NaN neighbours leave a row's bits as they are."""
    shape = NAMED[name]
    own = jax.tree.map(np.array, example(shape))
    n, rows = own["page_table"].shape[1] + 50, len(shape.lengths)
    long_shape = dataclasses.replace(shape, lengths=(n * shape.page_size,) * rows, open_share=1.0)
    company = jax.tree.map(np.array, example(long_shape, seed=1))

    # row 0 keeps its query, list, length and tokens; its pages move into the larger pool
    held = own["page_table"].shape[1]
    company["pages"][:, company["page_table"][0, :held]] = own["pages"][:, own["page_table"][0]]
    company["blocks"][0, :, :held] = own["blocks"][0]
    for key in ("q", "counts", "lengths"):
        company[key][0] = own[key][0]
    alone = company | {"counts": company["counts"] * (np.arange(rows)[:, None] == 0).astype(np.int32)}
    faulty = company | {"pages": company["pages"].copy()}
    faulty["pages"][:, company["page_table"][1:]] = np.nan

    expected, *others = [bits(case) for case in (company, alone, faulty)]
    for result in others:
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.parametrize("name", ["group_3", "group_4", "page_128", "dim_256", "sparse"])
def test_padding_the_list_changes_no_bit(name):
    shape = NAMED[name]
    arguments = example(shape)
    out, block_lse = bits(arguments)
    m = arguments["blocks"].shape[2]
    blocks = np.pad(arguments["blocks"], ((0, 0), (0, 0), (0, 41)), constant_values=7)
    wide_out, wide_lse = bits(arguments | {"blocks": blocks})
    np.testing.assert_array_equal(wide_out, out)
    np.testing.assert_array_equal(wide_lse[..., : 4 * m], block_lse)


def test_all_blocks_listed_is_dense_attention():
    """Against jax.nn.dot_product_attention over the same tokens laid out in order."""
    shape = NAMED["whole_pages"]
    arguments = example(shape)
    b, k, n, s, d = len(shape.lengths), shape.num_kv_heads, shape.num_blocks, shape.page_size, shape.head_dim
    token = arguments["pages"][:, arguments["page_table"]].reshape(k, b, n * s, shape.width).transpose(1, 2, 0, 3)
    expected = jax.nn.dot_product_attention(
        arguments["q"][:, None],
        token[..., :d],
        token[..., d : 2 * d],
        key_value_seq_lengths=arguments["lengths"],
        implementation="xla",
    )
    out, _ = run(arguments, "xla")
    np.testing.assert_allclose(out, np.asarray(expected[:, 0]), atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["group_4", "dim_256"])
def test_temporaries_do_not_grow_with_the_pool(name):
    shape = NAMED[name]
    arguments = example(shape)

    def temporaries(num_pages):
        pool = jax.ShapeDtypeStruct((shape.num_kv_heads, num_pages, shape.page_size, shape.width), shape.dtype)
        lowered = compiled(paged_attention, backend="xla").lower(arguments | {"pages": pool})
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes, pool.size * pool.dtype.itemsize

    small, _ = temporaries(1_000)
    large, pool_bytes = temporaries(100_000)
    assert large <= small + 4096
    assert large < pool_bytes / 100


def test_the_number_of_steps_is_read_from_the_counts():
    """A step count known to the compiler would be that of the whole list, however little is listed.

    Known is how many slots there are to be walked apart; not how far, apart or together.
    """
    shape = NAMED["group_3"]
    text = compiled(paged_attention, backend="xla").lower(example(shape)).compile().as_text() or ""
    known = re.findall(r'known_trip_count":{"n":"(\d+)"', text)
    assert known == [str(len(shape.lengths))] and text.count(" while(") == len(known) + 2


WRONG = {
    "heads": ({"q": (2, 7, 64)}, "q"),
    "narrow": ({"q": (2, 6, 65)}, "pages"),
    "lanes": ({"pages": (2, 5, 16, 192)}, "pages"),
    "table": ({"page_table": (3, 4)}, "page_table"),
    "blocks": ({"blocks": (2, 3, 4)}, "blocks"),
    "no_blocks": ({"blocks": (2, 2, 0)}, "blocks"),
    "counts": ({"counts": (2,)}, "counts"),
    "lengths": ({"lengths": (3,)}, "lengths"),
}
RIGHT = {
    "q": (2, 6, 64),
    "pages": (2, 5, 16, 128),
    "page_table": (2, 4),
    "blocks": (2, 2, 4),
    "counts": (2, 2),
    "lengths": (2,),
}


def zeros(shapes):
    return {name: jnp.zeros(x, jnp.float32 if name in ("q", "pages") else jnp.int32) for name, x in shapes.items()}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_named(case):
    change, argument = WRONG[case]
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        paged_attention(**zeros(RIGHT | change), softmax=SOFTMAX)
    if isinstance(caught.value, ValueError):
        assert str(caught.value).startswith(f"{argument}: got ") and "wanted" in str(caught.value)


def test_rows_that_fill_no_whole_slot_are_named():
    with pytest.raises(ValueError, match="rows_per_slot: got 3, wanted a number that divides the 2 rows of q"):
        paged_attention(**zeros(RIGHT), softmax=SOFTMAX, rows_per_slot=3)


def test_readers_that_cannot_be_are_named():
    right = zeros(RIGHT | {"readers": RIGHT["blocks"]})
    with pytest.raises(ValueError, match="readers: got int16, wanted int32"):
        paged_attention(**right | {"readers": jnp.ones(RIGHT["blocks"], jnp.int16)}, softmax=SOFTMAX)
    many = zeros(RIGHT | {"q": (64, 6, 64), "lengths": (64,), "readers": RIGHT["blocks"]})
    with pytest.raises(ValueError, match="rows_per_slot: got 32, wanted at most 31 with readers"):
        paged_attention(**many, softmax=SOFTMAX, rows_per_slot=32)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match='backend: got "cuda", wanted one of'):
        paged_attention(**zeros(RIGHT), softmax=SOFTMAX, backend="cuda")


@pytest.mark.parametrize(("name", "dtype"), [("q", jnp.float16), ("pages", jnp.float16), ("blocks", jnp.int16)])
def test_a_wrong_dtype_is_named(name, dtype):
    arguments = zeros(RIGHT)
    with pytest.raises(ValueError) as caught:
        paged_attention(**(arguments | {name: arguments[name].astype(dtype)}), softmax=SOFTMAX)
    assert str(caught.value).startswith(f"{name}: got {jnp.dtype(dtype)}, wanted")


def test_a_pool_in_8_bits_needs_scales_and_scales_a_pool_in_8_bits():
    arguments = zeros(RIGHT)
    integers = arguments["pages"].astype(jnp.int8)
    for wrong, words in (
        ({"pages": integers}, "pages: got int8"),
        ({"kv_scales": jnp.ones((2, 5, 2, 16))}, "pages: got float32, wanted int8 or float8_e4m3fn"),
        ({"pages": integers, "kv_scales": jnp.ones((2, 4, 2, 16))}, "kv_scales: got shape"),
    ):
        with pytest.raises((ValueError, TypeCheckError)) as caught:
            paged_attention(**(arguments | wrong), softmax=SOFTMAX)
        if isinstance(caught.value, ValueError):
            assert str(caught.value).startswith(words)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_chip_whose_kernel_reads_no_such_int8_pages_says_which_backend_does(backend):
    shape = NAMED["int8"]
    module = importlib.import_module(f"et_jax.pallas.paged_attention.{backend}")
    with pytest.raises(NotImplementedError, match='use "xla"'):
        module.paged_attention(**example(shape))
