"""Laws of the pass over page summaries: what bounds a block's scores does, what its codes say is as near as told."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from ladder import numbers, results, taken

from et_jax.decode import cache
from et_jax.pallas.block_scores import block_scores, code_scores
from scripts.measuring.kernel_shapes.block_scores import SHAPES, TESTED, Shape, example

# sums of up to 256 products of size one, in float32 whatever the inputs' dtype
TOLERANCE = 5e-5
NAMED = {shape.name: shape for shape in SHAPES}
FUNCTIONS = {"block": block_scores, "code": code_scores}


def run(name: str, arguments, shape: Shape, backend: str):
    """What a function returns, as float64 numpy, by a backend."""
    return numbers(results(FUNCTIONS[name], arguments, backend=backend, **shape.settings))


def assert_equals_reference(got, name: str, arguments, shape: Shape):
    assert_close(got, run(name, arguments, shape, "reference"))


CAP = 1.5  # where a third of the scores are larger


def formula(name: str, arguments, shape: Shape, soft_cap: float = np.inf):
    """The docstrings' formulas, block by block, in float64 numpy."""
    arrays = {key: np.asarray(x, np.float64) for key, x in arguments.items()}
    table, d, s = np.asarray(arguments["page_table"]), shape.head_dim, shape.page_size
    scale, group = shape.settings["scale"], shape.num_heads // shape.num_kv_heads
    size = (len(shape.lengths), shape.num_heads, shape.num_blocks)
    if name == "block":
        results = [np.full(size, -np.inf) for _ in range(3)]
    else:
        results = [np.full(size, -np.inf), np.zeros(size)]
    for row, length in enumerate(shape.lengths):
        for head in range(shape.num_heads):
            q, kv_head = arrays["q"][row, head], head // group
            for block in range(-(-length // s)):
                page = table[row, block]
                least, most = np.split(arrays["key_box"][kv_head, page, : 2 * d], 2)
                if name == "block":
                    ends = np.stack([q * least, q * most])
                    each = (ends.min(0), ends.max(0), q * arrays["mean"][kv_head, page, :d])
                    for result, value in zip(results, each, strict=True):
                        result[row, head, block] = scale * value.sum()
                else:
                    step = (most - least) / 255
                    codes = arrays["key_codes"][kv_head, page].reshape(s, d)[: length - block * s]
                    score = scale * (codes * step + least + 128 * step) @ q
                    score = score if soft_cap == np.inf else soft_cap * np.tanh(score / soft_cap)
                    results[0][row, head, block] = np.logaddexp.reduce(score)
                    results[1][row, head, block] = scale * (np.abs(q) * step).sum() / 2
    return results


def assert_close(got, expected):
    for one, other in zip(numbers(got), expected, strict=True):
        assert not np.isnan(one).any()
        np.testing.assert_array_equal(np.isinf(one), np.isinf(other))
        np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE)


def poisoned(arguments, shape: Shape):
    """The same summaries with NaN in all that no block holds: null page, free pages, padding, what is no mean key."""
    box, mean = np.array(arguments["key_box"]), np.array(arguments["mean"])
    unheld = np.ones(box.shape[1], bool)
    for row, length in enumerate(shape.lengths):
        unheld[np.asarray(arguments["page_table"])[row, : -(-length // shape.page_size)]] = False
    box[:, unheld], mean[:, unheld] = np.nan, np.nan
    box[..., 2 * shape.head_dim :], mean[..., shape.head_dim :] = np.nan, np.nan
    return arguments | {"key_box": box, "mean": mean}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_equals_the_formula(name, rung):
    def check(shape: Shape):
        arguments = example(shape)
        assert_close(run(name, arguments, shape, "reference"), formula(name, arguments, shape))

    rung(f"{name}_scores reference = formula", TESTED, 20, check)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("case", ["group_3", "codes_dim_96", "empty_slots"])
def test_codes_are_summed_after_the_cap(case, backend):
    shape = NAMED[case]
    arguments = example(shape)
    got = numbers(results(code_scores, arguments, backend=backend, soft_cap=CAP, **shape.settings))
    assert_close(got, formula("code", arguments, shape, CAP))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_xla_equals_reference(name, rung):
    def check(shape: Shape):
        arguments = example(shape)
        assert_equals_reference(run(name, arguments, shape, "xla"), name, arguments, shape)

    rung(f"{name}_scores xla = reference", TESTED, 20, check)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", ["dim_96", "empty_slots", "all_empty", "spare", "group_1"])
def test_what_no_block_holds_may_be_nan(case, name, backend):
    shape = NAMED[case]
    arguments = example(shape)
    clean, dirty = run(name, arguments, shape, backend), run(name, poisoned(arguments, shape), shape, backend)
    for got, expected in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_of_what_the_cache_wrote_bracket_its_tokens(dtype):
    """Keys through the cache's own summaries and codes: their scores, token by token in float64, obey the bounds."""
    k, n, s, d, g, length = 2, 6, 8, 16, 3, 48  # of a page that is not full there is no summary
    rng = np.random.default_rng(0)
    table, lengths = jnp.asarray(rng.permutation(n)[None] + 1, jnp.int32), jnp.full(1, length, jnp.int32)
    new_key, new_value = (jnp.asarray(rng.standard_normal((1, length, k, d)), dtype) for _ in range(2))
    layer = cache.empty(1, k, d, n + 1, s, dtype, key_codes=True).layers[0]
    written = cache.write(layer, new_key, new_value, table, jnp.zeros(1, jnp.int32), lengths)
    q = jnp.asarray(3 * rng.standard_normal((1, k * g, d)), jnp.float32)
    key = np.asarray(written.pages[:, table[0], :, :d], np.float64)
    score = np.einsum("kgd,knsd->kgns", np.asarray(q, np.float64).reshape(k, g, d), key) * 0.5
    score[..., np.arange(n * s).reshape(n, s) >= length] = -np.inf
    assert written.summary is not None
    box, mean, codes = written.summary.key_box, written.summary.mean, written.key_codes
    assert codes is not None
    how: dict[str, Any] = {"page_size": s, "scale": 0.5, "backend": "xla"}
    low, high, middle = (np.asarray(x).reshape(k, g, n) for x in block_scores(q, box, mean, table, lengths, **how))
    assert np.all(high >= score.max(-1) - TOLERANCE)
    assert np.all(low <= np.where(np.isinf(score), np.inf, score).min(-1) + TOLERANCE)
    counts = np.clip(length - np.arange(n) * s, 0, s)
    np.testing.assert_allclose(middle, np.where(np.isinf(score), 0, score).sum(-1) / counts, atol=TOLERANCE)
    log_mass, error = (np.asarray(x).reshape(k, g, n) for x in code_scores(q, codes, box, table, lengths, **how))
    apart = np.abs(log_mass - np.logaddexp.reduce(score, axis=-1))
    assert np.all(apart <= error + TOLERANCE) and apart.max() > 0.01 * error.max()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    shape = NAMED["group_4"]
    arguments = example(shape)
    expected = run(name, arguments, shape, "xla")
    emptied = arguments | {"lengths": np.asarray(arguments["lengths"]) * np.array([1, 0], np.int32)}
    other = arguments | {"q": arguments["q"].at[1].set(jnp.nan)}
    for case in (emptied, other):
        for got, wanted in zip(run(name, case, shape, "xla"), expected, strict=True):
            np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (2, 1), (3, 3), (2, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_alone_and_beside_others(name, heads):
    """Beside rows that are empty, walked in another tile, and beside rows as long."""
    kv_heads, group = heads
    shape = dataclasses.replace(NAMED["group_4"], num_kv_heads=kv_heads, num_heads=kv_heads * group, lengths=(60,) * 16)
    arguments = example(shape)
    beside = run(name, arguments, shape, "xla")
    alone = run(
        name, arguments | {"lengths": arguments["lengths"] * (jnp.arange(16) == 2).astype(jnp.int32)}, shape, "xla"
    )
    for got, wanted in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(got[2], wanted[2])


WRONG = {
    "heads": ({"q": (2, 7, 64)}, "q"),
    "narrow": ({"q": (2, 6, 65)}, "key_box"),
    "mean": ({"mean": (2, 4, 128)}, "mean"),
    "codes": ({"key_codes": (2, 5, 16 * 63)}, "key_codes"),
    "table": ({"page_table": (3, 4)}, "page_table"),
    "lengths": ({"lengths": (3,)}, "lengths"),
}
RIGHT = {
    "q": (2, 6, 64),
    "key_box": (2, 5, 128),
    "mean": (2, 5, 128),
    "key_codes": (2, 5, 16 * 64),
    "page_table": (2, 4),
    "lengths": (2,),
}
DTYPES = {"key_codes": jnp.int8, "page_table": jnp.int32, "lengths": jnp.int32}


def zeros(shapes):
    return {name: jnp.zeros(x, DTYPES.get(name, jnp.float32)) for name, x in shapes.items()}


def calls(name, arguments, **settings):
    return FUNCTIONS[name](**taken(FUNCTIONS[name], arguments), **({"scale": 1.0, "page_size": 16} | settings))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_named(case):
    change, argument = WRONG[case]
    for name, function in FUNCTIONS.items():
        if not taken(function, change):
            continue
        with pytest.raises((ValueError, TypeCheckError)) as caught:
            calls(name, zeros(RIGHT | change))
        if isinstance(caught.value, ValueError):
            assert str(caught.value).startswith(f"{argument}: got ") and "wanted" in str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale: got 0.0, wanted a positive number"),
        ({"page_size": 0}, "page_size: got 0, wanted at least 1 token"),
        ({"backend": "cuda"}, 'backend: got "cuda", wanted one of'),
    ],
)
def test_a_wrong_setting_is_named(name, change, message):
    with pytest.raises(ValueError) as caught:
        calls(name, zeros(RIGHT), **change)
    assert str(caught.value).startswith(message)


def test_a_wrong_cap_is_named():
    with pytest.raises(ValueError, match=r"soft_cap: got 0\.0, wanted a positive number or None"):
        calls("code", zeros(RIGHT), soft_cap=0.0)


@pytest.mark.parametrize(("argument", "dtype"), [("q", jnp.float16), ("key_box", jnp.float16), ("mean", jnp.bfloat16)])
def test_a_wrong_dtype_is_named(argument, dtype):
    arguments = zeros(RIGHT)
    with pytest.raises(ValueError) as caught:
        calls("block", arguments | {argument: arguments[argument].astype(dtype)})
    assert str(caught.value).startswith(f"{argument}: got {jnp.dtype(dtype)}, wanted")
