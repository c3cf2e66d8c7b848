"""A mixture of experts through the paged cache: what a rule changes, the experts that are counted, what they cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend
from small_model import MODEL, PROMPTS, configuration, run, start, texts, weights

from et_jax.decode import cost
from et_jax.decode.decoder import decoder
from et_jax.decode.plant import costs
from et_jax.models.config import ExpertConfig
from et_jax.models.experts import choose, gate
from et_jax.models.model import num_multiplied
from et_jax.models.transformer import forward, mix_as_trained
from et_jax.models.weights import num_bytes

pytestmark = pytest.mark.usefixtures("hardly_optimised")

EXPERTS = ExpertConfig(num_experts=6, num_per_token=3, width=20, normalised=True, layers=(True, False), shared_width=16)
MIXTURE = dataclasses.replace(MODEL, experts=EXPERTS)


@functools.cache
def written():
    """The rows of two slots of three: that of the other has no token."""
    d, params = decoder(configuration(model=MIXTURE)), weights(model=MIXTURE)
    state = d.empty()
    for slot in (0, 2):
        state = start(d, params, state, slot, PROMPTS[slot], temperature=0.0)
    _, rows = run(d, params, state)
    return {slot: rows[slot] for slot in (0, 2)}


def own_experts(tokens: list[int]) -> np.ndarray:
    """The experts that the dense program's mixture takes for every token, by number."""
    found = []

    def noting(layer, experts, x, memory):
        [own] = experts.each
        found.append(choose(EXPERTS, gate(own, x[0])).expert)
        return mix_as_trained(EXPERTS, own, x), memory

    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(len(tokens))[None]
    forward(weights(model=MIXTURE), MIXTURE, ids, positions, dense_attend(MIXTURE), None, noting)
    return np.asarray(found[0])


def test_the_books_hold_each_expert_that_a_step_touched_once_and_each_token_its_own():
    rows = written()
    taken = {slot: own_experts(PROMPTS[slot] + text)[len(PROMPTS[slot]) - 1 :] for slot, text in texts(rows).items()}
    [work] = rows[0].work
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
    [work] = written()[0].work
    price = cost.price(model, jax.tree.map(lambda x: np.float64(x[0]), work))
    assert price.shared == model.weights + work.experts.touched[0] * model.expert
    assert price.flops >= 2 * num_multiplied(MIXTURE)
