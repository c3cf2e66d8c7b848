"""A cache of another dtype than the weights: completions near those of the same dtype, charged by its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reopened import SENTENCE, SIZES

from et_jax.decode.cache import token_width
from et_jax.decode.eight_bits import dtype_named
from et_jax.serve import engine
from et_jax.serve.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SHARED = SIZES | {"page_size": 4, "num_pages": 130, "max_num_seqs": 2, "max_resident_seqs": 2, "dtype": "float32"}


def served(cache_dtype: str):
    """A model of float32 weights, its completion of the prompt, and the entropies of that."""
    model = engine.load(**SHARED | {"cache_dtype": cache_dtype})
    [done] = model.generate(SENTENCE * 2, GREEDY)
    stored = {layer.pages.dtype for layer in model.decoder().empty().plants[0].cache.layers}
    assert stored == {dtype_named(cache_dtype) if cache_dtype != "auto" else jnp.dtype(jnp.float32)}
    entropies = np.array([row.entropy for row in done.trace])
    assert done.finish_reason == "length" and np.isfinite(entropies).all()
    return model, done, entropies


@pytest.fixture(scope="module")
def exact():
    return served("auto")


@pytest.mark.parametrize(("cache_dtype", "near"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_a_cache_is_charged_by_its_bytes_scales_included(cache_dtype, near, exact):
    model, done, entropies = served(cache_dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.weights)} == {jnp.dtype(jnp.float32)}
    assert 0 < abs(entropies[0] - exact[2][0]) < near
    read = [row.blocks_read for row in done.trace]
    assert read == [row.blocks_read for row in exact[1].trace]
    width = token_width(model.config.head_dim)
    of_token = 2 * width if cache_dtype == "bfloat16" else width + 2 * 4  # with the scales of a key and of a value
    assert exact[1].cost - done.cost == pytest.approx(sum(read) * 4 * (4 * width - of_token), rel=1e-9)
    assert any(f"pages of 4 tokens in {cache_dtype}" in line for line in model.describe())
