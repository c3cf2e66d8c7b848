"""A cache of another dtype than the weights: texts near those of the same dtype, charged by the bytes that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH, Plain
from reopened import SIZES

from et_jax.control.presets import preset
from et_jax.decode.cache import token_width
from et_jax.decode.eight_bits import dtype_named
from et_jax.models.bundled import bundled_folder
from et_jax.models.module import ModuleConfig
from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PROMPT = "It was in the spring of that year that the old house by the river was let again. " * 2
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SHARED = SIZES | {"page_size": 4, "num_pages": 130, "max_num_seqs": 2, "max_resident_seqs": 2}


def opened(dtype: str, cache_dtype: str, **settings) -> engine.Model:
    return engine.load(**SHARED | {"dtype": dtype, "cache_dtype": cache_dtype} | settings)


def text_of(model: engine.Model):
    [done] = model.generate(GenerationRequest(prompt=PROMPT, params=GREEDY))
    assert done.finish_reason == "length"
    return done, np.array([row.entropy for row in done.trace])


def cached(model: engine.Model) -> set:
    return {layer.pages.dtype for layer in model.decoder().empty().plants[0].cache.layers}


@pytest.fixture(scope="module")
def exact():
    return text_of(opened("float32", "auto"))


def test_a_float32_model_serves_from_a_bfloat16_cache_at_half_its_bytes(exact):
    model = opened("float32", "bfloat16")
    assert cached(model) == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(model.weights)} == {jnp.dtype(jnp.float32)}
    done, entropies = text_of(model)
    assert entropies[0] != exact[1][0] and abs(entropies[0] - exact[1][0]) < 0.02  # keys and values have 8 bits
    rows = [(one.blocks_read, other.blocks_read) for one, other in zip(done.trace, exact[0].trace, strict=True)]
    assert all(one == other for one, other in rows)
    half = sum(one for one, _ in rows) * 4 * token_width(model.config.head_dim) * 2
    assert exact[0].cost - done.cost == pytest.approx(half, rel=1e-9)
    assert any("pages of 4 tokens in bfloat16" in line for line in model.describe())


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_a_cache_in_8_bits_is_charged_by_its_bytes_scales_included(cache_dtype, exact):
    model = opened("float32", cache_dtype)
    done, entropies = text_of(model)
    assert entropies[0] != exact[1][0] and abs(entropies[0] - exact[1][0]) < 0.1
    rows = [(one.blocks_read, other.blocks_read) for one, other in zip(done.trace, exact[0].trace, strict=True)]
    assert all(one == other for one, other in rows)
    width = token_width(model.config.head_dim)
    saved = sum(one for one, _ in rows) * 4 * (4 * width - width - 2 * 4)
    assert exact[0].cost - done.cost == pytest.approx(saved, rel=1e-9)
    assert any(f"pages of 4 tokens in {cache_dtype}" in line for line in model.describe())


@pytest.mark.parametrize(
    ("settings", "cache_dtype"),
    [
        ({"control": "adaptive"}, "fp8"),
        (
            {"cache_budget": 36, "control": "certified", "draft": "self", "draft_tokens": 2, "draft_length": "fixed"},
            "int8",
        ),
    ],
    ids=str,
)
def test_every_way_of_reading_reads_such_a_cache(settings, cache_dtype, exact):
    model = opened("float32", cache_dtype, **settings)
    _, entropies = text_of(model)
    assert cached(model) == {dtype_named(cache_dtype)} and np.isfinite(entropies).all()
    if "cache_budget" not in settings:
        assert abs(entropies[0] - exact[1][0]) < 0.1


def test_a_prompt_is_read_in_8_bits_under_a_budget_too(exact):
    model = opened("float32", "int8", control=preset("entropyinfer", prefill_budget=16))
    _, entropies = text_of(model)
    assert cached(model) == {jnp.dtype(jnp.int8)} and np.isfinite(entropies).all()
    assert entropies[0] != exact[1][0]


def test_a_module_may_have_a_cache_of_another_dtype():
    with jax.numpy_dtype_promotion("standard"):  # flax mixes dtypes of its own
        module = Plain(4096, dtype=jnp.float32, rngs=nnx.Rngs(0))
        own = {"config": ModuleConfig(max_positions=LENGTH), "tokenizer": bundled_folder()}
        sizes = {"page_size": 4, "max_num_seqs": 2}
        model = engine.load(module, cache_dtype="bfloat16", **own, **sizes)
        assert cached(model) == {jnp.dtype(jnp.bfloat16)}
        [done] = model.generate("It was", max_tokens=4, ignore_eos=True)
        assert len(done.token_ids) == 4 and done.error is None
