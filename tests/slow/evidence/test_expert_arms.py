"""A mixture that reads given text under a rule goes to the experts that it goes to where it decodes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PROMPTS, configuration, dense, paged_texts, texts, weights

from et_jax.control.controller import Controller
from et_jax.control.experts import Entropy, TopK
from et_jax.decode.decoder import decoder
from et_jax.evidence.expert_arms import Taken, counts, even, run, shuffled, union
from et_jax.models.config import ExpertConfig

EXPERTS = ExpertConfig(num_experts=6, num_per_token=3, width=20, normalised=True, layers=(True, True))
MIXTURE = dataclasses.replace(MODEL, experts=EXPERTS)


def test_tokens_go_to_as_many_experts_as_where_they_are_decoded():
    rule = Entropy(least=0.3, scale=8.0)
    d = decoder(configuration(model=MIXTURE, controller=Controller(experts=rule)))
    rows = paged_texts(d, weights(model=MIXTURE), temperature=0.0)
    for slot, written in texts(rows).items():
        tokens = np.array([PROMPTS[slot] + written], np.int32)
        taken = run(MIXTURE, weights(model=MIXTURE), tokens, rule, start=len(PROMPTS[slot]) - 1)
        own = counts(MIXTURE, taken)[0].sum(-1)
        [work] = rows[slot].work
        assert own.tolist() == work.experts.chosen.tolist()
        assert own[0] == 6 and len(set(own.tolist())) > 1


def test_all_experts_are_the_dense_program_and_told_ones_are_taken():
    params, tokens = weights(model=MIXTURE), np.array([PROMPTS[2]], np.int32)
    logits, _ = dense(params, MIXTURE, PROMPTS[2])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    taken = run(MIXTURE, params, tokens, TopK(), start=4)
    np.testing.assert_allclose(taken.loss[0], -log_p[np.arange(4, 20), PROMPTS[2][5:]], atol=1e-3)
    expected = -np.sum(np.exp(log_p) * log_p, axis=-1)[4:19]
    assert taken.entropy[0, 0] == np.inf
    np.testing.assert_allclose(taken.entropy[0, 1:], expected, atol=1e-3)
    told = np.random.default_rng(0).integers(1, 4, (1, 16, 2)).astype(np.int32)
    assert (counts(MIXTURE, run(MIXTURE, params, tokens, told, start=4)) == told).all()


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="a model that mixes experts"):
        run(MODEL, weights(), np.zeros((1, 4), np.int32), TopK(), start=1)


def test_counts_are_as_even_as_they_can_be_and_shuffled_token_by_token():
    like = np.random.default_rng(1).integers(1, 5, (4, 10, 2))
    found = even(2.25, like)
    assert found.shape == like.shape and sorted(set(found.ravel().tolist())) == [2, 3] and found.mean() == 2.25
    moved = shuffled(like)
    assert moved.shape == like.shape and (moved != like).any()
    assert sorted(map(tuple, moved.reshape(-1, 2))) == sorted(map(tuple, like.reshape(-1, 2)))


def test_the_union_counts_an_expert_of_a_step_once():
    expert = jnp.asarray([[[[0, 1, 6]], [[2, 6, 6]]], [[[1, 3, 4]], [[5, 0, 6]]]])  # two rows of two tokens, one layer
    nothing = jnp.zeros((2, 2))
    taken = Taken(loss=nothing, entropy=nothing, expert=expert)
    assert union(MIXTURE, taken, 1) == (2 + 1 + 3 + 2) / 4
    assert union(MIXTURE, taken, 2) == (4 + 3) / 2
