"""Laws of prefill attention over pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from ladder import TOLERANCE, as_bytes, assert_attention_close, compiled, numbers, results, with_nan_unseen

from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_prefill import paged_prefill
from et_jax.softmax import Softmax
from scripts.measuring.kernel_shapes.paged_prefill import SHAPES, TESTED, Shape, example

NAMED = {shape.name: shape for shape in SHAPES}
# What the shapes for Hopper vary beside the others is nothing to XLA; a slow test has the definition of these.
HOPPER = [shape for shape in TESTED if shape.name.startswith("hopper")]
PLAIN = [shape for shape in TESTED if shape not in HOPPER]
SOFTMAX = Softmax(scale=1.0)


def both(arguments, shape: Shape, backend: str):
    """Attention and block sums, None where none are asked for, by a backend."""
    return results(paged_prefill, arguments, backend=backend, **shape.settings)


def run(arguments, shape: Shape, backend: str):
    """Attention as float64 numpy, by a backend."""
    return numbers(both(arguments, shape, backend)[0])


def bits(arguments, shape: Shape, backend: str = "xla"):
    """Attention as bytes."""
    return as_bytes(both(arguments, shape, backend)[0])


def assert_equals_reference(got, arguments, shape: Shape):
    assert_attention_close(got, both(arguments, shape, "reference"), shape.dtype)


def dense_float64(arguments, shape: Shape):
    """The formula of the docstring, query by query, in float64 numpy."""
    arrays, sinks = numbers(arguments), arguments["softmax"].sink_logits
    table, b, t, h = np.asarray(arguments["page_table"]), *arrays["q"].shape[:3]
    d, s, k = shape.head_dim, shape.page_size, shape.num_kv_heads
    every = np.broadcast_to(np.arange(shape.num_blocks), (b, k, shape.num_blocks))
    blocks = every if arguments["blocks"] is None else np.asarray(arguments["blocks"])
    counts = np.full((b, k), shape.num_blocks) if arguments["counts"] is None else np.asarray(arguments["counts"])
    out, lse = np.zeros((b, t, h, d)), np.full((b, t, h, blocks.shape[2]), -np.inf)
    for row, head, i in np.ndindex(b, h, t):
        kv_head, position = head // (h // k), shape.starts[row] + i
        first = 0 if shape.window is None else max(0, position + 1 - shape.window)
        sink = 0.0 if sinks is None else np.exp(np.float64(sinks[head]))
        mixed, total = np.zeros(d), sink
        for entry, block in enumerate(blocks[row, kv_head, : counts[row, kv_head]]):
            inside = slice(max(0, first - block * s), max(0, position + 1 - block * s))
            seen = arrays["pages"][kv_head, table[row, block]][inside]
            if arrays["kv_scales"] is not None:
                scales = arrays["kv_scales"][kv_head, table[row, block]][:, inside].T
                seen = seen * np.repeat(scales, [d, shape.width - d], axis=1)
            z = d**-0.5 * (seen[:, :d] @ arrays["q"][row, i, head])
            if shape.soft_cap is not None:
                z = shape.soft_cap * np.tanh(z / shape.soft_cap)
            mixed += np.exp(z) @ seen[:, d : 2 * d]
            total += np.exp(z).sum()
            lse[row, i, head, entry] = np.log(np.exp(z).sum()) if len(z) else -np.inf
        out[row, i, head] = mixed / total if total else 0.0
    return out, lse if shape.block_lse else None


def reference_is_right(shape: Shape):
    arguments = example(shape)
    assert_attention_close(both(arguments, shape, "reference"), dense_float64(arguments, shape), shape.dtype)


MIXED = [("float32", "bfloat16"), ("bfloat16", "float32")]


def of_two_dtypes(arguments, queries: str, pages: str):
    """The same with queries and pages of these dtypes."""
    return arguments | {"q": arguments["q"].astype(queries), "pages": arguments["pages"].astype(pages)}


@pytest.mark.parametrize("dtypes", MIXED)
def test_queries_and_pages_of_two_dtypes_are_multiplied_in_the_wider(dtypes):
    shape = dataclasses.replace(NAMED["group_4_bfloat16"], dtype=dtypes[0])
    arguments = of_two_dtypes(example(shape), *dtypes)
    assert_equals_reference(both(arguments, shape, "xla"), arguments, shape)


def test_reference_equals_the_formula(rung):
    rung("paged_prefill reference = formula", PLAIN, 26, reference_is_right)


@pytest.mark.slow
def test_reference_equals_the_formula_in_the_shapes_for_hopper(rung):
    rung("paged_prefill reference = formula, for Hopper", HOPPER, 15, reference_is_right)


def xla_is_right(shape: Shape):
    arguments = example(shape)
    assert_equals_reference(both(arguments, shape, "xla"), arguments, shape)


def test_xla_equals_reference(rung):
    rung("paged_prefill xla = reference", PLAIN, 26, xla_is_right)


def written(arguments, shape: Shape, real: int):
    """Which tokens of the pool "k p s" are those before the chunk, or among the first `real` of it."""
    found = np.zeros(arguments["pages"].shape[:3], bool)
    for row, start in enumerate(shape.starts):
        place = np.arange(start + real)
        found[:, np.asarray(arguments["page_table"])[row, place // shape.page_size], place % shape.page_size] = True
    return found


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", ["group_3", "dim_96", "window", "group_4_bfloat16", "int8", "fp8_dim_96"])
def test_keys_past_a_query_may_be_nan(name, backend):
    """With half the chunk real, the other half's keys and the null page NaN, real rows keep their bits."""
    shape = NAMED[name]
    arguments = example(shape)
    real = shape.chunk // 2
    dirty = with_nan_unseen(arguments, written(arguments, shape, real), 2 * shape.head_dim)
    clean, dirty = run(arguments, shape, backend), run(dirty, shape, backend)
    np.testing.assert_array_equal(dirty[:, :real], clean[:, :real])


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("column", [3, 70])
def test_a_fault_that_is_seen_shows(column, backend):
    """A NaN in a key or a value reaches every query that sees it, and no other."""
    shape = NAMED["sinks"]
    arguments = example(shape)
    pages, place = np.array(arguments["pages"]), shape.starts[0] + 5
    pages[0, np.asarray(arguments["page_table"])[0, place // 16], place % 16, column] = np.nan
    out = run(arguments | {"pages": pages}, shape, backend)[0]
    assert np.isnan(out[5:, :2]).any(axis=-1).all()
    assert not np.isnan(out[:5]).any() and not np.isnan(out[:, 2:]).any()


def with_a_fault(arguments, shape: Shape, of_value: bool):
    """The same pool in 8 bits, in which a number of the first head's key, or value, at place 5 of the chunk is NaN."""
    scales, place = np.array(arguments["kv_scales"]), shape.starts[0] + 5
    page = np.asarray(arguments["page_table"])[0, place // shape.page_size]
    scales[0, page, int(of_value), place % shape.page_size] = np.nan
    return arguments | {"kv_scales": scales}


def assert_fault_shows(out, shape: Shape):
    """Queries of the first head from place 5 on are NaN, and no others."""
    group = shape.num_heads // shape.num_kv_heads
    out = np.asarray(out, np.float64)[0]
    assert np.isnan(out[5:, :group]).any(axis=-1).all()
    assert not np.isnan(out[:5]).any() and not np.isnan(out[:, group:]).any()


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("of_value", [False, True])
def test_a_fault_in_8_bits_that_is_seen_shows(of_value, backend):
    shape = NAMED["int8"]
    assert_fault_shows(run(with_a_fault(example(shape), shape, of_value), shape, backend), shape)


def listing_every_block(arguments, shape: Shape):
    """The same arguments with a list of each block of the row, those of the future too."""
    b, k, n = len(shape.starts), shape.num_kv_heads, shape.num_blocks
    every = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, k, n))
    return arguments | {"blocks": every, "counts": jnp.full((b, k), n, jnp.int32)}


DENSE = ("ragged", "page_128", "all_of_them", "all_of_them_bfloat16")


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", DENSE)
def test_dense_is_listing_every_block(name, backend):
    """Bit for bit by the definition, to rounding by XLA; bit for bit with block sums and without them."""
    shape = NAMED[name]
    close = 2e-2 if shape.dtype == "bfloat16" else 2e-5
    arguments = example(shape)
    expected = bits(arguments, shape, backend)
    for block_lse in (False, True):
        asked = dataclasses.replace(shape, block_lse=block_lse)
        (out, lse), (listed_out, listed_lse) = (
            both(case, asked, backend) for case in (arguments, listing_every_block(arguments, shape))
        )
        np.testing.assert_array_equal(np.asarray(out).view(np.uint8), expected)
        if backend == "reference":
            np.testing.assert_array_equal(np.asarray(listed_out).view(np.uint8), expected)
        dense, listed = (np.asarray(x, np.float32) for x in (out, listed_out))
        np.testing.assert_allclose(listed, dense, rtol=close, atol=close)
        assert lse is None if not block_lse else np.allclose(lse, listed_lse, rtol=close, atol=close)


def with_nan_beyond_the_lists(arguments, shape: Shape):
    """The same pool with NaN in the pages that a KV head does not list, and in the null page."""
    table, read = np.asarray(arguments["page_table"]), np.zeros(arguments["pages"].shape[:3], bool)
    for row, head in np.ndindex(*arguments["counts"].shape):
        read[head, table[row, arguments["blocks"][row, head, : arguments["counts"][row, head]]]] = True
    return with_nan_unseen(arguments, read, shape.width)


SPARSE = ("int8_all_of_them", "listed", "sparse", "sparse_bfloat16", "sparse_all_of_them")


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", SPARSE)
def test_pages_that_are_not_listed_may_be_nan(name, backend):
    """They change no bit, and no more does how far a list is padded, nor with what."""
    shape = NAMED[name]
    arguments = example(shape)
    longer = np.pad(np.asarray(arguments["blocks"]), ((0, 0), (0, 0), (0, 20)), constant_values=1)
    out, lse = both(arguments, shape, backend)
    for case in (with_nan_beyond_the_lists(arguments, shape), arguments | {"blocks": longer}):
        other_out, other_lse = both(case, shape, backend)
        np.testing.assert_array_equal(np.asarray(other_out, np.float64), np.asarray(out, np.float64))
        if shape.block_lse:
            np.testing.assert_array_equal(other_lse[..., : shape.num_blocks], lse)
            assert np.isneginf(other_lse[..., shape.num_blocks :]).all()


@pytest.mark.parametrize("name", ["block_sums", "sparse", "sparse_bfloat16", "hopper_sparse"])
def test_block_sums_recombine(name):
    """Attention over two halves of the lists, weighted by what the block sums say each holds, is the whole."""
    shape = NAMED[name]
    arguments = example(shape) if shape.open_share else listing_every_block(example(shape), shape)
    blocks, counts = np.asarray(arguments["blocks"]), np.asarray(arguments["counts"])
    whole, whole_lse = numbers(both(arguments, shape, "xla"))
    half = counts // 2
    after = np.take_along_axis(blocks, np.minimum(np.arange(blocks.shape[2]) + half[..., None], blocks.shape[2] - 1), 2)
    mixed, weight = 0.0, 0.0
    for part in ({"counts": half}, {"blocks": after, "counts": counts - half}):
        out, lse = numbers(both(arguments | part, shape, "xla"))
        share = np.exp(lse).sum(-1, keepdims=True)
        mixed, weight = mixed + share * out, weight + share
    np.testing.assert_allclose(weight, np.exp(whole_lse).sum(-1, keepdims=True), rtol=1e-4)
    np.testing.assert_allclose(mixed / np.where(weight == 0.0, 1.0, weight), whole, atol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_nothing_listed_gives_zeros(backend):
    """Neither for an empty list nor for queries that stand before all that is listed is there NaN."""
    shape = NAMED["block_sums"]
    every = listing_every_block(example(shape), shape)
    empty = every | {"counts": jnp.zeros_like(every["counts"])}
    ahead = every | {"blocks": every["blocks"] + 1, "counts": jnp.ones_like(every["counts"])}
    out, lse = both(empty, shape, backend)
    assert not out.any() and np.isneginf(lse).all()
    out, lse = both(ahead, shape, backend)
    assert not out[1, :32].any() and np.isneginf(lse[1, :32]).all()
    assert out[1, 32:].all() and np.isfinite(lse[1, 32:, :, 0]).all()


@pytest.mark.parametrize("name", ["group_3", "ragged", "window", "all_of_them_bfloat16"])
def test_a_row_does_not_depend_on_how_long_the_loop_runs(name):
    """A neighbour far ahead, far behind or NaN leaves a row's bits as they are."""
    shape = dataclasses.replace(NAMED[name], starts=(300, 1900))
    arguments = jax.tree.map(np.array, example(shape))
    expected = bits(arguments, shape)
    near, first = (arguments | {"starts": np.array([300, start], np.int32)} for start in (300, 0))
    faulty = arguments | {"pages": arguments["pages"].copy()}
    faulty["pages"][:, arguments["page_table"][1]] = np.nan
    for case in (near, first, faulty):
        np.testing.assert_array_equal(bits(case, shape)[0], expected[0])


@pytest.mark.parametrize("name", ["group_3", "dim_128", "window", "soft_cap", "all_of_them_bfloat16"])
def test_one_query_is_a_decode_step(name):
    """The last query of a chunk sees what `paged_attention` sees with every block listed."""
    shape = NAMED[name]
    arguments = example(shape)
    out = run(arguments, shape, "xla")[:, -1]
    b, n = arguments["page_table"].shape
    decoded, _ = paged_attention(
        arguments["q"][:, -1],
        arguments["pages"],
        arguments["page_table"],
        jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, shape.num_kv_heads, n)),
        jnp.full((b, shape.num_kv_heads), n, jnp.int32),
        arguments["starts"] + shape.chunk,
        softmax=arguments["softmax"],
    )
    np.testing.assert_allclose(out, np.asarray(decoded, np.float64), atol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("name", ["group_3", "group_4_bfloat16"])
def test_temporaries_do_not_grow_with_the_pool(name):
    shape = NAMED[name]
    arguments = example(shape)

    def temporaries(num_pages):
        pool = jax.ShapeDtypeStruct((shape.num_kv_heads, num_pages, shape.page_size, shape.width), shape.dtype)
        lowered = compiled(paged_prefill, backend="xla", **shape.settings).lower(arguments | {"pages": pool})
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes, pool.size * pool.dtype.itemsize

    small, _ = temporaries(1_000)
    large, pool_bytes = temporaries(100_000)
    assert large <= small + 4096
    assert large < pool_bytes / 100


def test_the_number_of_steps_is_read_from_the_starts_or_the_lists():
    """A step count known to the compiler would be that of the whole table, however short the sequence."""
    shape = NAMED["group_3"]
    for arguments, known in ((example(shape), 0), (listing_every_block(example(shape), shape), 1)):  # over the lists
        text = compiled(paged_prefill, backend="xla", **shape.settings).lower(arguments).compile().as_text() or ""
        assert text.count(" while(") > known and text.count("known_trip_count") <= known


RIGHT = {"q": (2, 8, 6, 64), "pages": (2, 5, 16, 128), "page_table": (2, 4), "starts": (2,)}
WRONG = {
    "heads": ({"q": (2, 8, 7, 64)}, "q"),
    "narrow": ({"q": (2, 8, 6, 65)}, "pages"),
    "lanes": ({"pages": (2, 5, 16, 192)}, "pages"),
    "table": ({"page_table": (3, 4)}, "page_table"),
    "starts": ({"starts": (3,)}, "starts"),
    "lists": ({"blocks": (2, 3, 4), "counts": (2, 2)}, "blocks"),
    "no_room": ({"blocks": (2, 2, 0), "counts": (2, 2)}, "blocks"),
    "counts": ({"blocks": (2, 2, 4), "counts": (2, 3)}, "counts"),
}


def zeros(shapes):
    return {name: jnp.zeros(x, jnp.float32 if name in ("q", "pages") else jnp.int32) for name, x in shapes.items()}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_named(case):
    change, argument = WRONG[case]
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        paged_prefill(**zeros(RIGHT | change), softmax=SOFTMAX)
    if isinstance(caught.value, ValueError):
        assert str(caught.value).startswith(f"{argument}: got ") and "wanted" in str(caught.value)


def test_a_wrong_setting_is_named():
    with pytest.raises(ValueError, match="counts: got None, wanted the lengths of the lists in blocks"):
        paged_prefill(**zeros(RIGHT | {"blocks": (2, 2, 4)}), softmax=SOFTMAX)
    with pytest.raises(ValueError, match="blocks: got None, wanted lists of blocks with counts"):
        paged_prefill(**zeros(RIGHT | {"counts": (2, 2)}), softmax=SOFTMAX)
    with pytest.raises(NotImplementedError, match=r'backend "tpu" .*: use "xla"'):
        paged_prefill(**zeros(RIGHT), softmax=SOFTMAX, backend="tpu")
