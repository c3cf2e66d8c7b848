"""A mixture of experts through the paged cache: the dense program's text, its own experts alone, and honest books."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PROMPTS, configuration, dense, paged_texts, same_bits, text_of, texts, weights

from et_jax.control.controller import Controller
from et_jax.control.experts import Entropy, ExpertRule, Mass, TopK
from et_jax.decode import cost
from et_jax.decode.decoder import Decoder, decoder
from et_jax.decode.plant import costs
from et_jax.models.config import ExpertConfig
from et_jax.models.experts import choose, gate
from et_jax.models.model import num_multiplied
from et_jax.models.transformer import forward, mix_as_trained
from et_jax.models.weights import num_bytes
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

EXPERTS = ExpertConfig(num_experts=6, num_per_token=3, width=20, normalised=True, layers=(True, False), shared_width=16)
MIXTURE = dataclasses.replace(MODEL, experts=EXPERTS)
BARE = dataclasses.replace(
    MODEL, experts=dataclasses.replace(EXPERTS, normalised=False, shared_width=None, layers=(True, True))
)


compiled: dict[Any, Decoder] = {}


@functools.cache
def decoded(rule: ExpertRule | None, model=MIXTURE):
    """The decoder of a rule, compiled once for all of one structure, and what it writes."""
    config = configuration(model=model, controller=Controller(experts=rule))
    kind = model, jax.tree.structure(config.controller)
    if kind not in compiled:
        compiled[kind] = decoder(config)
    d = replace(compiled[kind], config=config)
    return d, paged_texts(d, weights(model=model), temperature=0.0)


@pytest.mark.parametrize("model", [MIXTURE, BARE])
def test_greedy_text_is_that_of_the_dense_program(model):
    _, rows = decoded(None, model)
    for slot, written in texts(rows).items():
        assert len(written) == 12
        logits, _ = dense(weights(model=model), model, PROMPTS[slot] + written)
        assert logits[len(PROMPTS[slot]) - 1 : -1].argmax(-1).tolist() == written


@pytest.mark.parametrize("rule", [TopK(3), Mass(1.0), Entropy(least=1.0)])
def test_a_rule_at_its_neutral_numbers_gives_the_bits_of_none(rule):
    assert same_bits(decoded(rule)[1], decoded(None)[1])


@pytest.mark.parametrize("rule", [TopK(1), Mass(0.6), Entropy(least=0.3, scale=8.0)])
def test_a_text_under_a_rule_does_not_depend_on_its_company(rule):
    d, rows = decoded(rule)
    together = texts(rows)
    assert together != texts(decoded(None)[1])
    for slot, tokens in PROMPTS.items():
        assert text_of(d, weights(model=MIXTURE), slot, tokens, temperature=0.0) == together[slot]


def own_experts(tokens: list[int]) -> np.ndarray:
    """The experts that the dense program's mixture takes for every token, by number."""
    found = []

    def noting(layer, experts, x, memory):
        found.append(choose(EXPERTS, gate(experts, x[0])).expert)
        return mix_as_trained(EXPERTS, experts, x), memory

    def attend(layer, q, k, v, memory, softmax):
        k, v = (jnp.repeat(x, MIXTURE.group_size, axis=2) for x in (k, v))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * softmax.scale
        seen = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v), memory

    ids = jnp.asarray(tokens, jnp.int32)[None]
    forward(weights(model=MIXTURE), MIXTURE, ids, jnp.arange(len(tokens))[None], attend, None, noting)
    return np.asarray(found[0])


def test_the_books_hold_each_expert_that_a_step_touched_once_and_each_token_its_own():
    _, rows = decoded(None)
    taken = {slot: own_experts(PROMPTS[slot] + text)[len(PROMPTS[slot]) - 1 :] for slot, text in texts(rows).items()}
    [work] = {slot: row.work for slot, row in rows.items()}[0]
    for step in range(12):
        union = set().union(*(taken[slot][step].tolist() for slot in taken))
        assert work.experts.touched[step] == len(union) < EXPERTS.num_experts + 1
        assert work.experts.chosen[step] == 3


def test_what_a_model_costs_is_told_apart_from_its_experts():
    d = decoder(configuration(model=MIXTURE))
    params = weights(model=MIXTURE)
    [model] = costs(d.config.plants, (params,), d.empty().plants)
    matrices = 3 * EXPERTS.width * MIXTURE.hidden_size
    assert (model.expert, model.expert_weights, model.per_token) == (4 * matrices, matrices, 3)
    assert model.weights == num_bytes(params) - 6 * model.expert
    assert model.num_multiplied + 3 * matrices == num_multiplied(MIXTURE)
    [work] = decoded(None)[1][0].work
    price = cost.price(model, jax.tree.map(lambda x: np.float64(x[0]), work))
    assert price.shared == model.weights + work.experts.touched[0] * model.expert
    assert price.flops >= 2 * num_multiplied(MIXTURE)
