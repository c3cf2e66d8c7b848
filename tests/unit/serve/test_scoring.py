"""Given texts are scored as the dense model scores them, behind any prefix, whatever else is read beside."""

import numpy as np
import pytest
from dense import dense_logits
from exact import log_softmax, surprisal_moments
from small_model import CHUNK, MODEL, PAGE, configuration, prompt, weights

from et_jax.decode.decoder import decoder
from et_jax.serve import scoring

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def read(model, params, prefix, texts):
    """The scores of texts behind a prefix, "4 t" each: all tokens but a first one that nothing precedes."""
    longest = max(map(len, texts))
    bound = decoder(scoring.scoring_config(configuration(model=model, num_slots=8, batch=8), longest, len(prefix)))
    rows = [scoring._Row(index, [*prefix[-1:], *text]) for index, text in enumerate(texts)]
    found = dict(scoring._read(bound, (params,), list(prefix[:-1]), rows))
    return [found[index] for index in range(len(texts))]


def expected(logits, ids):
    """By definition, from the logits after each token but the last."""
    z = np.asarray(logits, np.float64)[:-1]
    return np.stack([log_softmax(z)[np.arange(len(z)), ids[1:]], *surprisal_moments(z), z.argmax(1)])


@pytest.mark.parametrize("prefix", [0, 1, PAGE + 1, 5 * CHUNK + 3])
def test_many_texts_behind_a_prefix_are_scored_as_each_alone(prefix, monkeypatch):
    """More texts than there are slots, and than there are pages for; of one token among them."""
    monkeypatch.setattr(scoring, "_TOKENS", CHUNK)
    before = prompt(1, prefix)
    texts = [prompt(number, 1 + number * 7 % 20) for number in range(2, 24)]
    for got, text in zip(read(MODEL, weights(), before, texts), texts, strict=True):
        ids = [*before, *text]
        logits = dense_logits(MODEL, weights(), np.array([ids + [0] * (64 - len(ids))]))[0, : len(ids)]
        np.testing.assert_allclose(got, expected(logits, ids)[:, -got.shape[1] or len(ids) :], atol=2e-4, rtol=0)
        assert got.shape[1] == len(text) - (prefix == 0)


def test_a_score_sums_what_was_read():
    log_probs = np.array([np.nan, -1.0, -3.0])
    arrays = {"entropy": log_probs, "varentropy": log_probs, "greedy": np.zeros(3, bool)}
    score = scoring.Score(token_ids=(1, 2, 3), num_bytes=8, log_probs=log_probs, **arrays)
    assert score.num_scored == 2 and score.log_prob == -4
    assert score.perplexity == pytest.approx(np.exp(2)) and score.bits_per_byte == pytest.approx(0.5 / np.log(2))
