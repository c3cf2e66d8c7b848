"""The addition to the residual stream and the norm after it, in one kernel: its formula, and a model run by it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ladder import lowered_for_cuda

from et_jax.models.params import in_stacks
from et_jax.models.stacks import Threaded
from et_jax.models.transformer import forward, initialise
from et_jax.pallas.add_norm import add_norm, gpu
from et_jax.types import replace
from scripts.measuring.shapes import SMALL

MODEL = dataclasses.replace(SMALL, num_layers=3, windows=(None,) * 3)


def given(width: int, dtype: str, more: str) -> tuple:
    x, y, weights = jax.random.normal(jax.random.key(width), (3, 5, width))
    return x.astype(dtype), y.astype(more), weights.astype(dtype), jnp.int32(2)


@pytest.mark.parametrize("more", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_is_its_formula(width, more, offset):
    arguments = given(width, "bfloat16", more)
    x, y, weights = arguments[:3]
    settings = {"eps": 1e-3, "offset": offset}
    expected = np.asarray(x, np.float64) + np.asarray(y.astype(x.dtype), np.float64)
    for run in (partial(add_norm, backend="reference"), partial(gpu.add_norm, interpret=True)):
        found, normed = run(*arguments, **settings)
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8)
        exact = np.asarray(found, np.float64)
        exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3)
        exact *= offset + np.asarray(weights[2], np.float64)
        np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=2**-8)
        assert found.dtype == normed.dtype == x.dtype


def test_a_row_has_the_same_bits_in_any_company():
    x, y, weights, layer = given(96, "bfloat16", "float32")
    run = partial(gpu.add_norm, eps=1e-5, interpret=True)
    together, alone = run(x, y, weights, layer), run(x[3:4], y[3:4], weights, layer)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one[3:4].view(np.uint16), other.view(np.uint16))


def test_it_lowers_for_cuda():
    arguments = jax.eval_shape(lambda: given(96, "bfloat16", "float32"))
    assert "triton" in lowered_for_cuda(jax.jit(partial(gpu.add_norm, eps=1e-5)), *arguments)


def test_a_model_run_by_it_has_the_logits_that_it_has_without():
    params = initialise(MODEL, jax.random.key(0))
    stacked = in_stacks(params, MODEL, lambda *alike: jnp.stack(alike))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    position = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), tokens.shape)
    ran = []

    def attend(layer, q, k, v, memory, softmax):
        group = q.shape[2] // k.shape[2]
        return q + jnp.repeat(v, group, axis=2), replace(memory, outputs=(*memory.outputs, None))

    def counted(*arrays, **settings):
        ran.append(1)
        return add_norm(*arrays, **settings, backend="reference")

    expected, found = (
        forward(stacked, MODEL, tokens, position, attend, Threaded(carried=None), None, (None,) * 3, one)[0]
        for one in (None, counted)
    )
    assert len(ran) == 2  # of all layers, which one scan runs
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
