"""The yardstick: interpolated modified Kneser-Ney."""

import collections

import numpy as np
import pytest

from et_jax.training import ngram


def kneser_ney(stream, order, vocab_size):
    """Interpolated modified Kneser-Ney by dictionaries, straight from Chen & Goodman 1998."""
    padded = [0] * (order - 1) + list(stream)
    grams = [tuple(padded[i : i + order]) for i in range(len(stream))]
    counts = {order: collections.Counter(grams)}
    for n in range(order - 1, 0, -1):
        counts[n] = collections.Counter(gram[1:] for gram in counts[n + 1])

    def taken(n):
        n1, n2, n3, n4 = (sum(c == i for c in counts[n].values()) for i in range(1, 5))
        if n == 1:  # as every token follows many others here, no count is rare
            return [0, 0.75, 0.75, 0.75]
        y = n1 / (n1 + 2 * n2)
        return [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]

    discount = {n: taken(n) for n in counts}

    def probability(context, word):
        n = len(context) + 1
        below = probability(context[1:], word) if context else 1 / vocab_size
        followers = {gram[-1]: count for gram, count in counts[n].items() if gram[:-1] == context}
        if not followers:
            return below
        total = sum(followers.values())
        own = followers.get(word, 0)
        left = sum(discount[n][min(count, 3)] for count in followers.values())
        return (own - discount[n][min(own, 3)] + left * below) / total

    return probability


def test_ngram_is_kneser_ney_by_dictionaries_and_sums_to_one():
    random = np.random.default_rng(0)
    stream = (random.zipf(1.6, 600) % 11).astype(np.uint16)
    model = ngram.fit(stream, vocab_size=11, order=3, before=0)
    direct = kneser_ney(stream.tolist(), 3, 11)
    contexts = [(0, 0), (1, 2), (9, 9), (2, 1), (10, 7)]
    for context in contexts:
        grams = ngram.pack(np.array([[*context, word] for word in range(11)]).reshape(-1), 3, model.bits, 0)[2::3]
        found = ngram.probabilities(model, grams)
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(found, [direct(context, word) for word in range(11)], rtol=1e-12)
