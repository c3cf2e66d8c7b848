"""Queries and keys rotated, keys and values stored in their pages: the formula in float64, and a model run by it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ladder import lowered_for_cuda
from test_add_norm import MODEL

from et_jax.models.layers import rotate
from et_jax.models.params import in_stacks
from et_jax.models.stacks import Threaded
from et_jax.models.transformer import forward, initialise
from et_jax.pallas.add_norm import add_norm
from et_jax.pallas.rotate_store import gpu, rotate_store
from et_jax.types import replace

HEADS, DIM, SIZE, PAGES = 2, 16, 4, 9
START, COUNT = np.asarray([3, 6, 0], np.int32), np.asarray([1, 1, 0], np.int32)  # the last row does not run
SETTINGS = {"depth": 3, "columns": 8}


def given(group: int, r: int = DIM // 2) -> tuple:
    """Three rows and two past them, of the second of three layers that share a pool."""
    rng = np.random.default_rng(group)
    products = (rng.normal(size=(5, heads, DIM)) for heads in (HEADS * group, HEADS, HEADS))
    angle, table = rng.uniform(0, 7, (5, r)), np.asarray([[4, 1], [2, 8], [3, 5]], np.int32)
    floats = (jnp.asarray(x, jnp.float32) for x in (*products, np.cos(angle), np.sin(angle)))
    pages = jnp.asarray(rng.normal(size=(HEADS, 3 * PAGES, SIZE, 2 * DIM)), jnp.bfloat16)
    return *floats, pages, *map(jnp.asarray, (table, START, COUNT, np.asarray([1], np.int32)))


@pytest.mark.parametrize("r", [8, 6], ids=["all channels", "some channels"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_it_is_its_formula(group, r):
    arguments = given(group, r)
    q, k, v, cosine, sine, pages = (np.asarray(x, np.float64) for x in arguments[:6])
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, v))

    def rotated(x):
        turned = (x[..., :r] + 1j * x[..., r : 2 * r]) * (cosine + 1j * sine)[:, None]
        return np.concatenate([turned.real, turned.imag, x[..., 2 * r :]], axis=-1)

    for row, page, token in ((0, 4, 3), (1, 8, 2)):
        pages[:, PAGES + page, token] = np.concatenate([rotated(k)[row], v[row]], axis=-1)
    query, bits = rotated(q).reshape(5, HEADS, group, DIM)[:3], []
    for run in (partial(rotate_store, backend="reference"), partial(gpu.rotate_store, interpret=True)):
        found, stored = run(*arguments, **SETTINGS)
        np.testing.assert_allclose(np.asarray(found[:3, :, :group], np.float64), query, rtol=2**-8, atol=2**-12)
        np.testing.assert_allclose(np.asarray(stored, np.float64), pages, rtol=2**-8, atol=2**-12)
        assert not np.asarray(found[:3, :, group:]).any() and found.dtype == stored.dtype == jnp.bfloat16
        bits.append([x.view(np.uint16) for x in (found[:3, :, :group], stored)])
    jax.tree.map(np.testing.assert_array_equal, *bits)


def test_it_lowers_for_cuda():
    arguments = jax.eval_shape(lambda: given(4))
    assert "triton" in lowered_for_cuda(jax.jit(partial(gpu.rotate_store, **SETTINGS)), *arguments)


def test_a_model_that_leaves_its_products_to_attention_has_the_same_logits():
    stacked = in_stacks(initialise(MODEL, jax.random.key(0)), MODEL, lambda *alike: jnp.stack(alike))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    position, ran = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), tokens.shape), []

    def attend(layer, q, k, v, memory, softmax):
        return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), replace(memory, outputs=(*memory.outputs, None))

    def attend_products(layer, q, k, v, memory, softmax, angles):
        ran.append(1)
        return attend(layer, rotate(q, *angles), rotate(k, *angles), v, memory, softmax)

    run = partial(forward, stacked, MODEL, tokens, position, attend, Threaded(carried=None), None, (None,) * 3)
    fused = partial(add_norm, backend="reference")
    expected, found = run(fused)[0], run(fused, attend_products)[0]
    assert len(ran) == 1
    np.testing.assert_array_equal(found, expected)
