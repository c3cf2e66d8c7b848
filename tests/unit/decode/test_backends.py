"""Each device gets the kernels that serve the model, and the reason where they do not."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from small_model import MODEL, configuration

from et_jax.control.controller import Controller
from et_jax.control.select import ActiveSet, Certified, Dense
from et_jax.control.selector import as_selector
from et_jax.decode.backends import left_to_xla, scoring_backend, serving_backend

H200, A100, V5, V6 = ("NVIDIA H200", "cuda"), ("NVIDIA A100", "cuda"), ("TPU v5 lite", "tpu"), ("TPU v6 lite", "tpu")
NARROW_GROUP = dataclasses.replace(MODEL, num_heads=3, num_kv_heads=1)
BF16, F32, INT8, FP8 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
SORTING = as_selector(lambda view: jnp.sort(view.middle)[0] > 0)


def on(device):
    """As if this device were here."""
    if device is None:
        return contextlib.nullcontext()
    absent = jax.sharding.AbstractDevice(device[0], 1, device[1])
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), auto, abstract_device=absent))


@pytest.mark.parametrize(
    ("device", "page_size", "head_dim", "dtype", "cache_dtype", "backend", "reason"),
    [
        (H200, 64, 64, BF16, BF16, "gpu", None),
        (H200, 16, 64, BF16, BF16, "xla", "pages of entire tiles"),
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


@pytest.mark.parametrize("num_heads", [1, 2, 10])
def test_a_tpu_scores_the_codes_of_any_number_of_heads(num_heads):
    model = dataclasses.replace(MODEL, num_heads=num_heads, num_kv_heads=num_heads, head_dim=128)
    with on(V5):
        assert scoring_backend(model, 128, BF16, True, "tpu") == ("tpu", ())


def test_operations_of_a_selector_that_no_kernel_runs_are_named_with_the_reason():
    summed = as_selector(lambda view: jnp.sum(view.middle, axis=0) > 0)
    with on(H200):
        assert left_to_xla(MODEL, 64, 100, frozenset(), Certified()) == {}
        assert left_to_xla(MODEL, 64, 100, frozenset(), Dense()) == {}
        of_sort = left_to_xla(MODEL, 64, 100, frozenset(), SORTING)
        assert of_sort == {"kernels have no such operation": ("slice", "sort")}
        # as large an array is added up in pieces
        shifted = left_to_xla(MODEL, 64, 3000, frozenset({"masses"}), ActiveSet())
        assert shifted == {"kernels have no such operation": ("pad", "slice")}
        farthest = as_selector(lambda view: jnp.max(view.value_mean[None] - view.query[:, None], axis=(0, 2)) > 0)
        by_size = left_to_xla(MODEL, 64, 3000, frozenset(), farthest)
        assert "sub" in by_size["kernels support arrays of at most 32,768 numbers"]
        [(reason, names)] = left_to_xla(NARROW_GROUP, 64, 100, frozenset(), summed).items()
        assert "reduce_sum over the 3 query heads" in reason and names == ("all",)
    with on(V5):
        assert left_to_xla(MODEL, 128, 100, frozenset(), Certified()) == {}
        assert left_to_xla(NARROW_GROUP, 128, 100, frozenset(), summed) == {}
        assert left_to_xla(MODEL, 128, 100, frozenset(), SORTING) == of_sort
    assert left_to_xla(MODEL, 64, 100, frozenset(), summed) == {}


def test_a_configuration_says_what_xla_runs_of_its_selectors():
    config = configuration(controller=Controller(selector=SORTING))
    assert config.left_to_xla == ()
    with on(H200):
        [sentence] = config.left_to_xla
    assert sentence.startswith("XLA runs slice, sort of ") and sentence.endswith("kernels have no such operation")
