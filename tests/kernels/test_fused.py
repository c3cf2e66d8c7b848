"""Operations that a layer on a GPU does in one kernel each: formulas in float64, bits of a row, a model run by them.

They are the addition to the residual stream with the norm after it, the residual of unread blocks, and the rotation of
queries and keys with the store of keys and values in their pages.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ladder import lowered_for_cuda

from et_jax.models.layers import rotate
from et_jax.models.params import in_stacks
from et_jax.models.stacks import Threaded
from et_jax.models.transformer import forward, initialise
from et_jax.pallas.add_norm import add_norm
from et_jax.pallas.add_norm import gpu as norm_gpu
from et_jax.pallas.add_residual import add_residual
from et_jax.pallas.add_residual import gpu as residual_gpu
from et_jax.pallas.rotate_store import gpu as store_gpu
from et_jax.pallas.rotate_store import rotate_store
from et_jax.types import replace
from scripts.measuring.shapes import SMALL

MODEL = dataclasses.replace(SMALL, num_layers=3, windows=(None,) * 3)


def norm_given(width: int, dtype: str, more: str) -> tuple:
    x, y, weights = jax.random.normal(jax.random.key(width), (3, 5, width))
    return x.astype(dtype), y.astype(more), weights.astype(dtype), jnp.int32(2)


@pytest.mark.parametrize("more", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_an_addition_and_its_norm_are_their_formula(width, more, offset):
    arguments = norm_given(width, "bfloat16", more)
    x, y, weights = arguments[:3]
    settings = {"eps": 1e-3, "offset": offset}
    expected = np.asarray(x, np.float64) + np.asarray(y.astype(x.dtype), np.float64)
    for run in (partial(add_norm, backend="reference"), partial(norm_gpu.add_norm, interpret=True)):
        found, normed = run(*arguments, **settings)
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8)
        exact = np.asarray(found, np.float64)
        exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3)
        exact *= offset + np.asarray(weights[2], np.float64)
        np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=2**-8)
        assert found.dtype == normed.dtype == x.dtype


def test_a_normed_row_has_the_same_bits_in_any_company():
    x, y, weights, layer = norm_given(96, "bfloat16", "float32")
    run = partial(norm_gpu.add_norm, eps=1e-5, interpret=True)
    together, alone = run(x, y, weights, layer), run(x[3:4], y[3:4], weights, layer)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one[3:4].view(np.uint16), other.view(np.uint16))


ROWS, HEADS, WIDTH, BLOCKS = 3, 2, 32, 40


def residual_given(group: int, dtype: str = "bfloat16") -> tuple:
    """Outputs of two rows more than there are; pages without weight hold NaN, and one query head has no weight."""
    rng = np.random.default_rng(group)
    out = rng.normal(size=(ROWS + 2, HEADS * group, WIDTH))
    weight = rng.random((ROWS, HEADS, group, BLOCKS)) * (rng.random((ROWS, HEADS, 1, BLOCKS)) < 0.3)
    weight[0, 0, 0] = 0.0
    read = rng.random(weight.shape[:3])
    read[0, 0, 0] = 0.0
    table = 1 + np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    mean = np.full((HEADS, 1 + ROWS * BLOCKS, 2 * WIDTH), np.nan)
    for row, head, block in np.argwhere(weight.any(axis=2)):
        mean[head, table[row, block]] = rng.normal(size=2 * WIDTH)
    whole = read + weight.sum(axis=-1)
    numbers = [jnp.asarray(x, jnp.float32) for x in (read, weight, whole, mean)]
    return jnp.asarray(out, dtype), *numbers, jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_the_residual_is_its_formula(group):
    arguments = residual_given(group)
    out, read, weight, whole, mean, table = (np.asarray(x, np.float64) for x in arguments)
    value = np.nan_to_num(mean[:, table.astype(int), WIDTH:]).swapaxes(0, 1)
    attended = out[:ROWS].reshape(ROWS, HEADS, group, WIDTH)
    expected = read[..., None] * attended + np.einsum("bkgn,bknd->bkgd", weight, value)
    expected = expected / np.where(whole > 0, whole, 1.0)[..., None]
    for run in (partial(add_residual, backend="reference"), partial(residual_gpu.add_residual, interpret=True)):
        found = np.asarray(run(*arguments), np.float64)
        np.testing.assert_allclose(found[:ROWS].reshape(expected.shape), expected, rtol=2**-8, atol=2**-8)
        assert (found[ROWS:] == 0).all()


def test_a_row_of_the_residual_has_the_same_bits_beside_any_and_in_any_capacity():
    out, read, weight, whole, mean, table = residual_given(3)
    run = partial(residual_gpu.add_residual, interpret=True)
    together = run(out, read, weight, whole, mean, table)
    wider = [(0, 0), (0, 0), (0, 0), (0, 35)]
    alone = run(out[1:2], read[1:2], jnp.pad(weight[1:2], wider), whole[1:2], mean, jnp.pad(table[1:2], wider[2:]))
    np.testing.assert_array_equal(together[1:2].view(np.uint16), alone.view(np.uint16))


DIM, SIZE, PAGES = 16, 4, 9
START, COUNT = np.asarray([3, 6, 0], np.int32), np.asarray([1, 1, 0], np.int32)  # the last row does not run
SETTINGS = {"depth": 3, "columns": 8}


def store_given(group: int, r: int = DIM // 2) -> tuple:
    """Three rows and two past them, of the second of three layers that share a pool."""
    rng = np.random.default_rng(group)
    products = (rng.normal(size=(5, heads, DIM)) for heads in (HEADS * group, HEADS, HEADS))
    angle, table = rng.uniform(0, 7, (5, r)), np.asarray([[4, 1], [2, 8], [3, 5]], np.int32)
    floats = (jnp.asarray(x, jnp.float32) for x in (*products, np.cos(angle), np.sin(angle)))
    pages = jnp.asarray(rng.normal(size=(HEADS, 3 * PAGES, SIZE, 2 * DIM)), jnp.bfloat16)
    return *floats, pages, *map(jnp.asarray, (table, START, COUNT, np.asarray([1], np.int32)))


@pytest.mark.parametrize("r", [8, 6], ids=["all channels", "some channels"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_what_is_rotated_and_stored_is_its_formula(group, r):
    arguments = store_given(group, r)
    q, k, v, cosine, sine, pages = (np.asarray(x, np.float64) for x in arguments[:6])
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, v))

    def rotated(x):
        turned = (x[..., :r] + 1j * x[..., r : 2 * r]) * (cosine + 1j * sine)[:, None]
        return np.concatenate([turned.real, turned.imag, x[..., 2 * r :]], axis=-1)

    for row, page, token in ((0, 4, 3), (1, 8, 2)):
        pages[:, PAGES + page, token] = np.concatenate([rotated(k)[row], v[row]], axis=-1)
    query, bits = rotated(q).reshape(5, HEADS, group, DIM)[:3], []
    for run in (partial(rotate_store, backend="reference"), partial(store_gpu.rotate_store, interpret=True)):
        found, stored = run(*arguments, **SETTINGS)
        np.testing.assert_allclose(np.asarray(found[:3, :, :group], np.float64), query, rtol=2**-8, atol=2**-12)
        np.testing.assert_allclose(np.asarray(stored, np.float64), pages, rtol=2**-8, atol=2**-12)
        assert not np.asarray(found[:3, :, group:]).any() and found.dtype == stored.dtype == jnp.bfloat16
        bits.append([x.view(np.uint16) for x in (found[:3, :, :group], stored)])
    jax.tree.map(np.testing.assert_array_equal, *bits)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (partial(norm_gpu.add_norm, eps=1e-5), partial(norm_given, 96, "bfloat16", "float32")),
        (residual_gpu.add_residual, partial(residual_given, 4)),
        (partial(store_gpu.rotate_store, **SETTINGS), partial(store_given, 4)),
    ],
    ids=["add_norm", "add_residual", "rotate_store"],
)
def test_each_lowers_for_cuda(run, given):
    assert "triton" in lowered_for_cuda(jax.jit(run), *jax.eval_shape(given))


def test_a_model_run_by_them_has_the_logits_that_it_has_without():
    """Where it leaves its products to attention too, which rotates them."""
    stacked = in_stacks(initialise(MODEL, jax.random.key(0)), MODEL, lambda *alike: jnp.stack(alike))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    position, ran = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), tokens.shape), []

    def attend(layer, q, k, v, memory, softmax):
        return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), replace(memory, outputs=(*memory.outputs, None))

    def attend_products(layer, q, k, v, memory, softmax, angles):
        ran.append("attend")
        return attend(layer, rotate(q, *angles), rotate(k, *angles), v, memory, softmax)

    def fused(*arrays, **settings):
        ran.append("norm")
        return add_norm(*arrays, **settings, backend="reference")

    run = partial(forward, stacked, MODEL, tokens, position, attend, Threaded(carried=None), None, (None,) * 3)
    expected, found = run(None)[0], run(fused)[0]
    assert ran == ["norm"] * 2  # of all layers, which one scan runs
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(run(fused, attend_products)[0], found)
    assert ran.count("attend") == 1
