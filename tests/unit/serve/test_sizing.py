"""From settings to the sizes of a decoder: whole chunks, at least two rows, refusals in a sentence."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import LENGTH, MODEL

from et_jax.control.budget import ConstantBudget
from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration
from et_jax.models.config import RopeScaling
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import DEFAULT_PAGE_SIZE, decoder_config

BELOW_A_BLOCK = Controller(budget=ConstantBudget(tokens=3, segment=16))
sizes = st.none() | st.integers(1, 200)


@given(st.none() | st.integers(1, 48), sizes, st.none() | st.integers(2, LENGTH), st.integers(1, 20))
def test_chunks_are_whole_pages_and_a_call_is_whole_chunks(page_size, prefill_batch, length, seqs):
    settings = EngineConfig(
        page_size=page_size, prefill_batch=prefill_batch, max_model_len=length, max_num_seqs=seqs, backend="xla"
    )
    sized = decoder_config(settings, MODEL, jnp.float32)
    assert sized.page_size == (page_size or DEFAULT_PAGE_SIZE["cpu"])
    assert sized.chunk % sized.page_size == 0 and sized.prefill_batch % sized.chunk == 0
    assert sized.max_length == (length or LENGTH)
    assert sized.num_slots == sized.batch == max(2, seqs)  # one row alone is another program
    assert sized.num_pages == sized.num_slots * sized.blocks_per_slot + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "int8", "fp8"])
def test_the_cache_has_the_dtype_asked_for_or_that_of_the_weights(dtype, asked):
    sized = decoder_config(EngineConfig(cache_dtype=asked, backend="xla"), MODEL, dtype)
    cached = jnp.dtype({"auto": dtype, "fp8": jnp.float8_e4m3fn}.get(asked, asked))
    assert jnp.dtype(sized.cache_dtype) == cached and jnp.dtype(sized.weights_dtype) == dtype


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 1}, f"max_model_len is 1; bundled was made for {LENGTH} tokens, so choose from 2 to that."),
        ({"max_model_len": LENGTH + 1}, "so choose from 2 to that."),
        ({"num_pages": 1}, "num_pages is 1; it must be at least 2, because page 0 is the null page."),
        ({"max_resident_seqs": 3}, "max_resident_seqs is 3; it must be at least the 8 sequences that a step serves."),
        ({"cache_budget": 32}, "cache_budget is 32; it must be a multiple of page_size, 4, above 32"),
        ({"cache_budget": 0}, "cache_budget is 0; it must be at least 1."),
        ({"cache_budget": named("snapkv", 34)}, "cache_budget is 34; it must be a multiple of page_size, 4, above 32."),
        ({"cache_policy": "h2o"}, 'cache_policy is "h2o"; choose one of latent, snapkv, adakv, pyramidkv, streaming'),
        ({"control": BELOW_A_BLOCK}, "A prefill budget of 3 tokens is less than a block of"),
    ],
)
def test_a_size_that_cannot_work_with_this_model_is_told(settings, said):
    with pytest.raises(UsageError) as refused:
        decoder_config(EngineConfig(page_size=4, **settings, backend="xla"), MODEL, jnp.float32)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_policy_is_chosen_by_its_name_or_by_its_settings():
    """A name means the settings that a `Compression` of it would have, compressed again every quarter but by snapkv."""
    own = named("random", 40, window=8, every=8)
    for settings, expected in (
        ({"cache_policy": "streaming"}, named("streaming", 36, every=9)),
        ({"cache_policy": "snapkv"}, named("snapkv", 36)),
        ({"cache_budget": own}, own),
    ):
        settings = {"page_size": 4, "cache_budget": 36, "backend": "xla"} | settings
        assert decoder_config(EngineConfig(**settings), MODEL, jnp.float32).compression == expected


def test_pages_that_fit_count_more_than_those_asked_for():
    settings, of_its_own = EngineConfig(num_pages=30, backend="xla"), Calibration(temperature=1.5)
    assert decoder_config(settings, MODEL, jnp.float32).num_pages == 30
    assert decoder_config(settings, MODEL, jnp.float32, num_pages=20, calibration=of_its_own).num_pages == 20


def test_long_rotary_factors_are_for_texts_beyond_the_original_length():
    scaling = RopeScaling(
        kind="longrope", factor=4.0, original_max_positions=16, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
    )
    long = dataclasses.replace(MODEL, rope_scaling=scaling)
    for length, positions in ((16, 16), (17, LENGTH), (None, LENGTH)):
        settings = EngineConfig(max_model_len=length, backend="xla", page_size=4)
        assert decoder_config(settings, long, jnp.float32).model == dataclasses.replace(long, max_positions=positions)
        assert decoder_config(settings, MODEL, jnp.float32).model == MODEL
