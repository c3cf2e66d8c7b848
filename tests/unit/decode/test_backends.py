"""Each device gets the kernels that serve the model, and the reason where they do not."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from small_model import MODEL

from et_jax.decode.backends import scoring_backend, serving_backend

H200, A100, V5, V6 = ("NVIDIA H200", "cuda"), ("NVIDIA A100", "cuda"), ("TPU v5 lite", "tpu"), ("TPU v6 lite", "tpu")
BF16, F32, INT8, FP8 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn


def on(device):
    """As if this device were here."""
    if device is None:
        return contextlib.nullcontext()
    absent = jax.sharding.AbstractDevice(device[0], 1, device[1])
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=absent))


@pytest.mark.parametrize(
    ("device", "page_size", "head_dim", "dtype", "cache_dtype", "backend", "reason"),
    [
        (H200, 64, 64, BF16, BF16, "gpu", None),
        (H200, 64, 64, BF16, INT8, "gpu", None),
        (H200, 16, 64, BF16, BF16, "xla", "pages of whole tiles"),
        (H200, 64, 64, F32, F32, "xla", "float32"),
        (H200, 64, 64, F32, INT8, "xla", "float32 queries with int8 pages"),
        (A100, 64, 64, BF16, BF16, "xla", None),
        (V5, 128, 128, BF16, BF16, "tpu", None),
        (V6, 128, 128, BF16, FP8, "tpu", None),
        (V5, 16, 128, BF16, INT8, "xla", "int8 pages of a multiple of 32 tokens, not 16"),
        (None, 16, MODEL.head_dim, F32, F32, "xla", None),
    ],
)
def test_a_device_runs_its_own_kernels_or_xla_with_the_reason(
    device, page_size, head_dim, dtype, cache_dtype, backend, reason
):
    with on(device):
        found, reasons = serving_backend(dataclasses.replace(MODEL, head_dim=head_dim), page_size, dtype, cache_dtype)
    assert found == backend and len(reasons) == (reason is not None)
    assert all(reason in each and 'use "xla"' in each for each in reasons)


def test_blocks_are_scored_by_the_backend_of_attention_or_by_one_that_can():
    """Hopper scores no head dim of 256: attention runs on it, and the reason says who scores instead."""
    with on(H200):
        backend, [refusal] = scoring_backend(dataclasses.replace(MODEL, head_dim=256), 64, BF16, True, "gpu")
        assert backend == "xla" and 'use "xla"' in refusal
    assert scoring_backend(MODEL, 16, F32, True, "reference") == ("reference", ())
