"""The loss: the plain formula, in chunks, weighed, over packed documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_training import plain_attention, plain_pass
from small_runs import MIXED_VOCAB, VOCAB

from et_jax.models.transformer import initialise
from et_jax.softmax import Softmax
from et_jax.training import loop, loss


def drawn_tokens(rows, length, vocab_size):
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, vocab_size)
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(scores, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradient_are_those_of_the_plain_formula(settings, packed):
    """Of packed documents each target counts as its weight says."""
    params, (inputs, targets) = loop.initial_state(settings).params, drawn_tokens(3, 20, VOCAB)
    weights = jax.random.uniform(jax.random.key(2), targets.shape) * 10.0 if packed else None
    segments = jnp.broadcast_to(jnp.arange(20) // 9, targets.shape) if packed else None

    def plain(params):
        losses = losses_of(plain_pass(loss.unstack(params), settings.model, inputs, segments), targets)
        return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()

    expected, wanted = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(loss.mean_loss), static_argnums=1)(
        params, settings.model, inputs, targets, weights, segments
    )
    assert float(found) == pytest.approx(float(expected), abs=1e-3)  # bfloat16 rounds logits of size 0.1 to 2^-12
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.03 * jnp.linalg.norm(formula)  # bfloat16: 2^-8 per product
    if not packed:
        each = loss.token_losses(params, settings.model, inputs, targets)
        assert each.mean().item() == pytest.approx(float(found), abs=1e-5)


def test_attention_in_chunks_is_attention_at_once_within_documents(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    segments = jnp.array([[0] * 7 + [1] * 13, [0] * 12 + [1] * 5 + [-1] * 3])
    monkeypatch.setattr(loss, "QUERY_CHUNK", 8)
    for given, window in ((None, None), (None, 6), (segments, None)):
        found, _ = loss.causal_attend(0, q, k, v, given, Softmax(scale=8**-0.5, window=window))
        expected = plain_attention(q, k, v, jnp.zeros_like(segments) if given is None else given, window)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_hits_are_where_the_likeliest_token_of_the_plain_model_is_the_target(mixed_settings):
    params, (inputs, _) = loop.initial_state(mixed_settings).params, drawn_tokens(2, 24, MIXED_VOCAB)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), loss.unstack(params))
    best = jax.jit(lambda params: plain_pass(params, mixed_settings.model, inputs))(exact).argmax(axis=-1)
    targets = jnp.where(jnp.arange(24) % 3 == 0, best, (best + 1) % MIXED_VOCAB)
    found = loss.hits(params, mixed_settings.model, inputs, targets)
    assert (found == (jnp.arange(24) % 3 == 0)).mean() > 0.9  # products in bfloat16 may swap the two likeliest


def test_layers_of_several_windows_are_those_of_the_plain_formula(settings):
    config = dataclasses.replace(settings.model, num_layers=3, windows=(6, None, None))
    assert loss.runs(config) == (range(1), range(1, 3))
    drawn = initialise(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), drawn)
    inputs, targets = drawn_tokens(3, 20, VOCAB)
    expected = losses_of(plain_pass(params, config, inputs), targets).mean()
    found = loss.mean_loss(loss.stack(params, config), config, inputs, targets)
    assert float(found) == pytest.approx(float(expected), abs=0.02)  # products in bfloat16
