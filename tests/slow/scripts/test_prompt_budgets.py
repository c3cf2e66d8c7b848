"""Budgets compared on text: dense reading is the plain forward pass, sizes are met, a shuffle keeps the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, prompt, weights

from et_jax.control.budget import ConstantBudget, EntropyBudget
from et_jax.control.segment import Segment
from et_jax.decode.plant import Plant
from et_jax.models.sensitivity import causal_attend
from et_jax.models.transformer import forward
from et_jax.types import replace
from scripts.measuring.prompts import SizedConstant, SizedEntropy, logits_of

PAGE, SEGMENT, LENGTH = 4, 8, 48
PLANT = Plant(model=MODEL, page_size=PAGE, backend="xla", scores_backend="xla")
COMMON = {"segment": SEGMENT, "dense_layers": 0, "dense_until": 0}
TOKENS = jnp.asarray([prompt(1, LENGTH), prompt(2, LENGTH)], jnp.int32)


def read(budget):
    return logits_of(PLANT, weights(), budget, TOKENS, segment=SEGMENT)


def segment(number=0, layer=1):
    return Segment(
        score=jnp.asarray(np.random.default_rng(number).normal(size=(2, 12)), jnp.float32),
        visible=jnp.arange(12) < 10,
        interval=None,
        index=jnp.int32(5),
        layer=jnp.int32(layer),
        block_size=PAGE,
        scale=1.0,
    )


def test_where_all_is_read_the_logits_are_those_of_the_plain_forward_pass():
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    wanted = jax.nn.log_softmax(forward(weights(), MODEL, TOKENS, positions, causal_attend, None)[0])
    got, num_read, num_held = read(ConstantBudget(tokens=LENGTH, **COMMON))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    before = sum(start // PAGE for start in range(0, LENGTH, SEGMENT))
    np.testing.assert_array_equal(num_read, num_held)
    np.testing.assert_array_equal(num_held, MODEL.num_layers * MODEL.num_kv_heads * before)


@pytest.mark.parametrize("tokens", [4.0, 6.0, 16.0])
def test_a_traced_size_is_the_size_itself(tokens):
    sized, _ = SizedConstant(tokens=tokens, **COMMON).choose(segment(), {})
    assert int(sized.sum()) == 2 * tokens / PAGE
    if tokens % PAGE == 0:
        plain, _ = ConstantBudget(tokens=int(tokens), **COMMON).choose(segment(), {})
        np.testing.assert_array_equal(sized, plain)
        law = EntropyBudget(tokens=int(tokens), **COMMON)
        one, other = (
            each.choose(segment(), each.started(2))[0] for each in (law, SizedEntropy(tokens=tokens, **COMMON))
        )
        np.testing.assert_array_equal(one, other)


def test_a_shuffle_gives_heads_each_others_budgets():
    plain, shuffled = (SizedEntropy(shuffled=way, floor=0.1, tokens=4.0, **COMMON) for way in (False, True))
    notes, differ = plain.started(2), 0
    notes = plain.updated(jnp.asarray([0.9, 0.5]), plain.updated(jnp.asarray([0.3, 0.5]), notes))
    for layer in range(8):
        sharp = replace(segment(layer=layer), score=jnp.asarray([[0.0] * 12, [9.0] + [0.0] * 11]))
        one, other = (np.asarray(law.choose(sharp, notes)[0]).sum(axis=1) for law in (plain, shuffled))
        assert abs(int(one.sum()) - int(other.sum())) <= 1 and one[0] != one[1]
        differ += abs(int(one[0]) - int(other[0])) > 1
    assert 0 < differ < 8
