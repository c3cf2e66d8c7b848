"""Text is that of the dense model: attention over the whole sequence in one program, without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capabilities import module, of_module
from dense import dense_logits
from own_modules import own_logits

from et_jax.decode.sampling.noise import race_noise
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams

LIMIT = 16


def logits_of(served, text: list[int]) -> np.ndarray:
    """What the model itself says of every token of a text, in one pass."""
    if served.capability.load is of_module:
        return own_logits(module(), text)
    model = served.model
    stored = model.decoder_config.cache_dtype if in_8_bits(served) else jnp.float32
    return np.asarray(dense_logits(model.config, model.params, jnp.asarray([text], jnp.int32), stored)[0], np.float64)


def in_8_bits(served) -> bool:
    return jnp.dtype(served.model.decoder_config.cache_dtype).itemsize == 1


def written(served, temperature: float) -> list[tuple[Completion, np.ndarray]]:
    """Completions of several prompts, and the dense model's logits before each of their tokens."""
    numbers = served.capability.dense
    if numbers is None:
        pytest.skip("this capability reads in part whatever its numbers")
    prompts = [tuple(served.tokens[at : at + length]) for at, length in ((0, 1), (3, 9), (5, 17), (8, 20))]
    asked = [
        GenerationRequest(
            prompt=prompt,
            params=SamplingParams(max_tokens=LIMIT, temperature=temperature, ignore_eos=True, seed=seed),
            control=dict(numbers) or None,
        )
        for seed, prompt in enumerate(prompts)
    ]
    done = served.anew().generate(asked)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, done, strict=True)]
    return [(one, logits_of(served, text)[-LIMIT - 1 : -1]) for one, text in zip(done, texts, strict=True)]


def allowed(served) -> float:
    if in_8_bits(served):  # the dense model reads what is stored; near a half one of them rounds otherwise
        return 0.02
    return 1e-3 if served.model.decoder_config.cache_dtype == jnp.float32 else 0.15


def test_greedy_text_and_its_surprisals_are_those_of_the_dense_model(served):
    for done, logits in written(served, 0.0):
        of_token = logits[np.arange(LIMIT), list(done.token_ids)]
        assert (logits.max(axis=-1) - of_token).max() <= allowed(served)
        surprisal = np.logaddexp.reduce(logits, axis=-1) - of_token
        np.testing.assert_allclose([row.surprisal for row in done.trace], surprisal, atol=allowed(served))


def test_a_sampled_token_wins_the_race_of_its_own_place(served):
    for seed, (done, logits) in enumerate(written(served, 0.8)):
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 0))
        place = done.prompt_tokens + np.arange(LIMIT, dtype=np.int32)
        noise = race_noise(jnp.tile(key, (LIMIT, 1)), jnp.asarray(place), logits.shape[-1])
        heat = np.array([[row.temperature] for row in done.trace])  # what a law made of the request's
        score = logits / heat - np.log(np.asarray(noise, np.float64))
        behind = score.max(axis=-1) - score[np.arange(LIMIT), list(done.token_ids)]
        assert heat.min() > 0.1 and (behind <= 2 * allowed(served) / heat[:, 0]).all()
