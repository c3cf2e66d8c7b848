"""Greedy text is that of the dense model: attention over the whole sequence in one program, without a cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from capabilities import module, of_module
from dense import dense_logits
from own_modules import own_logits

from et_jax.serve.requests import GenerationRequest, SamplingParams

LIMIT = 16


def logits_of(served, text: list[int]) -> np.ndarray:
    """What the model itself says of every token of a text, in one pass."""
    if served.capability.load is of_module:
        return own_logits(module(), text)
    model = served.model
    return np.asarray(dense_logits(model.config, model.params, jnp.asarray([text], jnp.int32))[0], np.float64)


def test_greedy_text_and_its_surprisals_are_those_of_the_dense_model(served):
    numbers = served.capability.dense
    if numbers is None:
        pytest.skip("this capability reads in part whatever its numbers")
    prompts = [tuple(served.tokens[at : at + length]) for at, length in ((0, 1), (3, 9), (5, 17), (8, 20))]
    params = SamplingParams(max_tokens=LIMIT, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(prompt=prompt, params=params, control=dict(numbers) or None) for prompt in prompts]
    off = 1e-3 if served.model.decoder_config.cache_dtype == jnp.float32 else 0.15
    for request, done in zip(asked, served.anew().generate(asked), strict=True):
        text = [*request.prompt, *done.token_ids]
        logits = logits_of(served, text)[len(request.prompt) - 1 : -1]
        of_token = logits[np.arange(LIMIT), list(done.token_ids)]
        assert (logits.max(axis=-1) - of_token).max() <= off
        surprisal = np.logaddexp.reduce(logits, axis=-1) - of_token
        np.testing.assert_allclose([row.surprisal for row in done.trace], surprisal, atol=off)
