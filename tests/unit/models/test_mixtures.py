"""Mixtures of experts: every form is the same, fewer experts share the weight, and a token has its own bits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import BIASED, CONFIG, drawn, mix, tokens

from et_jax.models.experts import choose, gate, mixed
from et_jax.models.weights import quantized
from et_jax.types import replace


@pytest.mark.parametrize("changes", [{}, {"normalised": False}, {"shared_width": None}, BIASED])
def test_every_form_is_that_of_ragged_products(changes):
    """Which is that of transformers, in `test_golden.py`."""
    config = dataclasses.replace(CONFIG, **changes)
    experts, x = drawn(config), tokens(40)
    with jax.default_matmul_precision("highest"):
        expected = mix(config, experts, x, "ragged")
        for form in ("loop", "every"):
            np.testing.assert_allclose(mix(config, experts, x, form), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="wanted floats where every expert"):
        mix(config, quantized(experts, jnp.float32), x, "every")


def test_experts_that_no_token_goes_to_are_not_read():
    experts, x = drawn(), tokens(2)
    touched = choose(CONFIG, gate(experts, x)).touched(CONFIG.num_experts)
    assert 0 < touched.sum() < CONFIG.num_experts
    unread = jnp.where(touched[:, None, None], 0.0, jnp.nan)
    matrices = {name: getattr(experts, name) for name in ("gate", "up", "down")}
    broken = {name: replace(leaf, array=leaf.array + unread) for name, leaf in matrices.items()}
    np.testing.assert_array_equal(mix(CONFIG, replace(experts, **broken), x, "loop"), mix(CONFIG, experts, x, "loop"))


def test_fewer_experts_share_the_weight_and_none_have_none():
    experts, x = drawn(), tokens(3)
    probability = np.asarray(gate(experts, x))
    choice = choose(CONFIG, jnp.asarray(probability), lambda _: jnp.asarray([3, 2, 0]))
    best = -np.sort(-probability, axis=1)
    np.testing.assert_allclose(choice.weight[0], best[0, :3] / best[0, :3].sum(), rtol=1e-6)
    np.testing.assert_allclose(choice.weight[1], [*(best[1, :2] / best[1, :2].sum()), 0], rtol=1e-6)
    assert choice.expert[1, 2] == CONFIG.num_experts and (choice.expert[2] == CONFIG.num_experts).all()
    assert not choice.weight[2].any()
    np.testing.assert_array_equal(choice.expert[:2, :2], np.argsort(-probability, axis=1)[:2, :2])
    out = jax.jit(partial(mixed, form="loop"))(replace(experts, shared=None), x, choice)
    assert out[0].any() and not out[2].any()


@pytest.mark.slow
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
