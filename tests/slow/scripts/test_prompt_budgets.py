"""Budgets compared on text: dense reading is the plain forward pass, sizes are met, a shuffle keeps the sum."""

import jax
import jax.numpy as jnp
import numpy as np
from small_model import MODEL, prompt, weights

from et_jax.control.budget import ConstantBudget
from et_jax.decode.plant import Plant
from et_jax.models.sensitivity import causal_attend
from et_jax.models.transformer import forward
from scripts.measuring.prompts import logits_of

PAGE, SEGMENT, LENGTH = 4, 8, 48
PLANT = Plant(model=MODEL, page_size=PAGE, backend="xla", scores_backend="xla")
COMMON = {"segment": SEGMENT, "dense_layers": 0, "dense_until": 0}
TOKENS = jnp.asarray([prompt(1, LENGTH), prompt(2, LENGTH)], jnp.int32)


def read(budget):
    return logits_of(PLANT, weights(), budget, TOKENS, segment=SEGMENT)


def test_where_all_is_read_the_logits_are_those_of_the_plain_forward_pass():
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    wanted = jax.nn.log_softmax(forward(weights(), MODEL, TOKENS, positions, causal_attend, None)[0])
    got, num_read, num_held = read(ConstantBudget(tokens=LENGTH, **COMMON))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    before = sum(start // PAGE for start in range(0, LENGTH, SEGMENT))
    np.testing.assert_array_equal(num_read, num_held)
    np.testing.assert_array_equal(num_held, MODEL.num_layers * MODEL.num_kv_heads * before)
