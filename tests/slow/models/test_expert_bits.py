"""What a token's experts make of it has the same bits in any company, and a gradient."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import BIASED, CONFIG, drawn, mix, tokens

from et_jax.models.experts import choose, gate, mixed
from et_jax.types import replace


@pytest.mark.parametrize(
    ("num_experts", "changes", "dtype"),
    [
        (8, {"shared_width": None}, jnp.float32),
        (68, {"shared_width": 48}, jnp.float32),
        (68, {"shared_width": 48}, jnp.bfloat16),
        (32, BIASED, jnp.bfloat16),
    ],
)
def test_a_token_has_the_same_bits_among_any_number(num_experts, changes, dtype):
    """The router has few outputs past a multiple of 64, which a product by itself does not keep alike."""
    config = dataclasses.replace(CONFIG, num_experts=num_experts, width=48, **changes)
    experts, x = drawn(config, dtype, 256), tokens(700, dtype, 256)
    most = np.asarray(mix(config, experts, x, "loop"))
    for number in (2, 17, 130):
        assert np.asarray(mix(config, experts, x[:number], "loop")).tobytes() == most[:number].tobytes(), number
        assert np.asarray(mix(config, experts, x[-number:], "loop")).tobytes() == most[-number:].tobytes(), number


@pytest.mark.parametrize("form", ["ragged", "every"])
def test_products_have_a_gradient(form):
    """That of the loop, by a difference."""
    experts, x = drawn(), tokens(5)

    @partial(jax.jit, static_argnums=1)
    def loss(experts, form):
        return jnp.sum(mixed(experts, x, choose(CONFIG, gate(experts, x)), form) ** 2)

    found = jax.grad(loss)(experts, form).up.array
    steepest = np.unravel_index(np.abs(found).argmax(), found.shape)
    nudge = jnp.zeros_like(found).at[steepest].set(1e-2)
    above, below = (
        loss(replace(experts, up=replace(experts.up, array=experts.up.array + way * nudge)), "loop") for way in (1, -1)
    )
    np.testing.assert_allclose(found[steepest], (above - below) / 2e-2, rtol=1e-2)
