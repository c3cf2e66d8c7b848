"""Rollouts are what the decoder sampled, at the log-probabilities of the trainer's own forward pass."""

import numpy as np
import pytest
from capabilities import TINY, tiny
from dense import dense_logits
from exact import log_softmax, surprisal_moments

from et_jax.errors import UsageError
from et_jax.training.rollouts import log_probs, rollouts

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_log_probabilities_are_those_of_a_forward_pass():
    with tiny(dtype="float32") as model:
        prompts = [model.tokenizer.encode(text) for text in ("It was", "The old king of the sea")]
        completions = model.generate(prompts, max_tokens=12, seed=5)
        found = rollouts(prompts, completions, 40)
        assert found.tokens.shape == (2, 40)
        for row, mask, prompt, one in zip(found.tokens, found.generated, prompts, completions, strict=True):
            assert row[mask].tolist() == list(one.token_ids) and row[: len(prompt)].tolist() == prompt
            assert np.flatnonzero(mask)[0] == len(prompt)
        z = dense_logits(TINY, model.params, found.tokens)[:, :-1]
        mask = found.generated[:, 1:]
        expected = np.take_along_axis(log_softmax(z), found.tokens[:, 1:, None].astype(int), axis=-1)[..., 0]
        np.testing.assert_allclose(found.log_probs[:, 1:][mask], expected[mask], atol=1e-5)
        np.testing.assert_allclose(log_probs(model.params, TINY, found.tokens)[:, 1:], expected, atol=1e-5)
        np.testing.assert_allclose(found.entropies[:, 1:][mask], surprisal_moments(z)[0][mask], atol=1e-5)
        assert not found.log_probs[~found.generated].any()
        with pytest.raises(UsageError, match="There are 1 prompts and 2 completions; give one for each"):
            rollouts(prompts[:1], completions)
        with pytest.raises(UsageError, match="length is 9; the longest prompt and continuation have 1"):
            rollouts(prompts, completions, 9)
