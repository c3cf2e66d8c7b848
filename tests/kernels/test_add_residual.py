"""The residual of unread blocks in one kernel: its formula in float64, rows past the last, and bits of a row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ladder import lowered_for_cuda

from et_jax.pallas.add_residual import add_residual, gpu

ROWS, HEADS, DIM, BLOCKS = 3, 2, 32, 40


def given(group: int, dtype: str = "bfloat16") -> tuple:
    """Outputs of two rows more than there are; pages without weight hold NaN, and one query head has no weight."""
    rng = np.random.default_rng(group)
    out = rng.normal(size=(ROWS + 2, HEADS * group, DIM))
    weight = rng.random((ROWS, HEADS, group, BLOCKS)) * (rng.random((ROWS, HEADS, 1, BLOCKS)) < 0.3)
    weight[0, 0, 0] = 0.0
    read = rng.random(weight.shape[:3])
    read[0, 0, 0] = 0.0
    table = 1 + np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    mean = np.full((HEADS, 1 + ROWS * BLOCKS, 2 * DIM), np.nan)
    for row, head, block in np.argwhere(weight.any(axis=2)):
        mean[head, table[row, block]] = rng.normal(size=2 * DIM)
    whole = read + weight.sum(axis=-1)
    numbers = [jnp.asarray(x, jnp.float32) for x in (read, weight, whole, mean)]
    return jnp.asarray(out, dtype), *numbers, jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_it_is_its_formula(group):
    arguments = given(group)
    out, read, weight, whole, mean, table = (np.asarray(x, np.float64) for x in arguments)
    value = np.nan_to_num(mean[:, table.astype(int), DIM:]).swapaxes(0, 1)
    attended = out[:ROWS].reshape(ROWS, HEADS, group, DIM)
    expected = read[..., None] * attended + np.einsum("bkgn,bknd->bkgd", weight, value)
    expected = expected / np.where(whole > 0, whole, 1.0)[..., None]
    for run in (partial(add_residual, backend="reference"), partial(gpu.add_residual, interpret=True)):
        found = np.asarray(run(*arguments), np.float64)
        np.testing.assert_allclose(found[:ROWS].reshape(expected.shape), expected, rtol=2**-8, atol=2**-8)
        assert (found[ROWS:] == 0).all()


def test_a_row_has_the_same_bits_in_any_company_and_capacity():
    out, read, weight, whole, mean, table = given(3)
    run = partial(gpu.add_residual, interpret=True)
    together = run(out, read, weight, whole, mean, table)
    wider = [(0, 0), (0, 0), (0, 0), (0, 35)]
    alone = run(out[1:2], read[1:2], jnp.pad(weight[1:2], wider), whole[1:2], mean, jnp.pad(table[1:2], wider[2:]))
    np.testing.assert_array_equal(together[1:2].view(np.uint16), alone.view(np.uint16))


def test_it_lowers_for_cuda():
    arguments = jax.eval_shape(lambda: given(4))
    assert "triton" in lowered_for_cuda(jax.jit(gpu.add_residual), *arguments)
