"""Laws of prefill attention over pages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_prefill import paged_prefill
from et_jax.pallas.paged_prefill.shapes import SHAPES, TESTED, Shape, example

# rounding of one value, times a few for the sums: relative to outputs of size one
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}
NAMED = {shape.name: shape for shape in SHAPES}


@functools.cache
def compiled(backend: str, **settings):
    """The op with its settings bound, compiled once for each shape of its arrays."""
    return jax.jit(lambda arrays: paged_prefill(**arrays, **settings, backend=backend))


def run(arguments, shape: Shape, backend: str):
    """Attention as float64 numpy, by a backend."""
    return np.asarray(compiled(backend, **shape.settings)(arguments), np.float64)


def bits(arguments, shape: Shape):
    """Attention as bytes."""
    return np.asarray(compiled("xla", **shape.settings)(arguments)).view(np.uint8)


def dense_float64(arguments, shape: Shape):
    """The formula of the docstring, query by query, in float64 numpy."""
    arrays: dict[str, Any] = {name: None if x is None else np.asarray(x, np.float64) for name, x in arguments.items()}
    table = np.asarray(arguments["page_table"])
    b, t, h, d = arrays["q"].shape
    out = np.zeros((b, t, h, d))
    for row, start in enumerate(shape.starts):
        cache = arrays["pages"][:, table[row]].reshape(shape.num_kv_heads, -1, shape.width)
        for head in range(h):
            token = cache[head // (h // shape.num_kv_heads)]
            sink = 0.0 if arrays["sink_logits"] is None else np.exp(arrays["sink_logits"][head])
            for i in range(t):
                first = 0 if shape.window is None else max(0, start + i + 1 - shape.window)
                seen = token[first : start + i + 1]
                z = shape.head_dim**-0.5 * (seen[:, :d] @ arrays["q"][row, i, head])
                if shape.soft_cap is not None:
                    z = shape.soft_cap * np.tanh(z / shape.soft_cap)
                out[row, i, head] = np.exp(z) @ seen[:, d : 2 * d] / (np.exp(z).sum() + sink)
    return out


def test_reference_equals_the_formula(capsys):
    for shape in TESTED:
        arguments = example(shape)
        got, expected = run(arguments, shape, "reference"), dense_float64(arguments, shape)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    with capsys.disabled():
        print(f"\npaged_prefill reference = formula: {len(TESTED)} shapes")
    assert len(TESTED) == 28


def test_xla_equals_reference(capsys):
    for shape in TESTED:
        arguments = example(shape)
        got, expected = run(arguments, shape, "xla"), run(arguments, shape, "reference")
        np.testing.assert_allclose(got, expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    with capsys.disabled():
        print(f"\npaged_prefill xla = reference: {len(TESTED)} shapes")
    assert len(TESTED) == 28


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", ["group_3", "dim_96", "window", "group_4_bfloat16"])
def test_keys_past_a_query_may_be_nan(name, backend):
    """With half the chunk real, the other half's keys and the null page NaN, real rows keep their bits."""
    shape = NAMED[name]
    arguments = example(shape)
    real = shape.chunk // 2
    pages = np.array(arguments["pages"])
    unused = np.ones(pages.shape[1:3], bool)
    for row, start in enumerate(shape.starts):
        place = np.arange(start + real)
        unused[np.asarray(arguments["page_table"])[row, place // shape.page_size], place % shape.page_size] = False
    pages[:, unused] = np.nan
    pages[..., 2 * shape.head_dim :] = np.nan
    clean, dirty = run(arguments, shape, backend), run(arguments | {"pages": pages}, shape, backend)
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


@pytest.mark.parametrize("name", ["group_3", "ragged", "window", "all_of_them_bfloat16"])
def test_a_row_does_not_depend_on_how_long_the_loop_runs(name):
    """A neighbour far ahead, far behind or NaN leaves a row's bits as they are."""
    shape = dataclasses.replace(NAMED[name], starts=(300, 1900))
    arguments: dict[str, Any] = {key: None if x is None else np.array(x) for key, x in example(shape).items()}
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
        sink_logits=arguments["sink_logits"],
        **shape.settings,
    )
    np.testing.assert_allclose(out, np.asarray(decoded, np.float64), atol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("name", ["group_3", "group_4_bfloat16"])
def test_temporaries_do_not_grow_with_the_pool(name):
    shape = NAMED[name]
    arguments = {key: x for key, x in example(shape).items() if x is not None}

    def temporaries(num_pages):
        pool = jax.ShapeDtypeStruct((shape.num_kv_heads, num_pages, shape.page_size, shape.width), shape.dtype)
        lowered = compiled("xla", **shape.settings).lower(arguments | {"pages": pool})
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes, pool.size * pool.dtype.itemsize

    small, _ = temporaries(1_000)
    large, pool_bytes = temporaries(100_000)
    assert large <= small + 4096
    assert large < pool_bytes / 100


def test_the_number_of_steps_is_read_from_the_starts():
    """A step count known to the compiler would be that of the whole table, however short the sequence."""
    shape = NAMED["group_3"]
    text = compiled("xla", **shape.settings).lower(example(shape)).compile().as_text() or ""
    assert " while(" in text and "known_trip_count" not in text


RIGHT = {"q": (2, 8, 6, 64), "pages": (2, 5, 16, 128), "page_table": (2, 4), "starts": (2,)}
WRONG = {
    "heads": ({"q": (2, 8, 7, 64)}, "q"),
    "narrow": ({"q": (2, 8, 6, 65)}, "pages"),
    "lanes": ({"pages": (2, 5, 16, 192)}, "pages"),
    "table": ({"page_table": (3, 4)}, "page_table"),
    "starts": ({"starts": (3,)}, "starts"),
}


def zeros(shapes):
    return {name: jnp.zeros(x, jnp.float32 if name in ("q", "pages") else jnp.int32) for name, x in shapes.items()}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_named(case):
    change, argument = WRONG[case]
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        paged_prefill(**zeros(RIGHT | change), scale=1.0)
    if isinstance(caught.value, ValueError):
        assert str(caught.value).startswith(f"{argument}: got ") and "wanted" in str(caught.value)


def test_a_wrong_setting_is_named():
    with pytest.raises(ValueError, match="window: got 0, wanted at least 1"):
        paged_prefill(**zeros(RIGHT), scale=1.0, window=0)
    with pytest.raises(NotImplementedError, match=r'backend "tpu" .*: use "xla"'):
        paged_prefill(**zeros(RIGHT), scale=1.0, backend="tpu")
