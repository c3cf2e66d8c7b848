"""The loss: the plain formula, in chunks, weighed, over packed documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import EXPERTS, MIXED_VOCAB, VOCAB

from et_jax.models.transformer import forward, initialise
from et_jax.softmax import Softmax
from et_jax.training import loop, loss


def plain_attention(q, k, v, segments):
    """Attention as its formula has it, every head and row at once."""
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool)) & (segments[:, :, None] == segments[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_loss_and_gradient_are_those_of_the_plain_formula(settings):
    params = loop.initial_state(settings).params
    tokens = jax.random.randint(jax.random.key(1), (3, 21), 0, VOCAB)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def attend(layer, q, k, v, memory, softmax):
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
        past = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(past, scores, -jnp.inf)), v), memory

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
        scores, _ = forward(loss.unstack(params), settings.model, inputs, positions, attend, None)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1).mean()

    expected, wanted = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(loss.mean_loss), static_argnums=1)(
        params, settings.model, inputs, targets
    )
    assert float(found) == pytest.approx(float(expected), abs=1e-3)  # bfloat16 rounds logits of size 0.1 to 2^-12
    assert loss.token_losses(params, settings.model, inputs, targets).mean().item() == pytest.approx(
        float(found), abs=1e-5
    )
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.03 * jnp.linalg.norm(formula)  # bfloat16: 2^-8 per product


def test_attention_in_chunks_is_attention_at_once(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    whole, _ = loss.causal_attend(0, q, k, v, None, Softmax(scale=8**-0.5))
    monkeypatch.setattr(loss, "QUERY_CHUNK", 8)
    chunked, _ = loss.causal_attend(0, q, k, v, None, Softmax(scale=8**-0.5))
    np.testing.assert_allclose(whole, chunked, atol=1e-6)


def test_packed_documents_do_not_attend_across_their_border(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    segments = jnp.array([[0] * 7 + [1] * 13, [0] * 12 + [1] * 5 + [-1] * 3])
    monkeypatch.setattr(loss, "QUERY_CHUNK", 8)
    packed, _ = loss.causal_attend(0, q, k, v, segments, Softmax(scale=8**-0.5))
    np.testing.assert_allclose(packed, plain_attention(q, k, v, segments), atol=1e-5)
    for row, begin, end in ((0, 0, 7), (0, 7, 20), (1, 12, 17)):
        queries, keys, values = (y[row : row + 1, begin:end] for y in (q, k, v))
        alone, _ = loss.causal_attend(0, queries, keys, values, None, Softmax(scale=8**-0.5))
        np.testing.assert_allclose(packed[row, begin:end], alone[0], atol=1e-6)


def test_another_document_in_the_row_changes_nothing(mixed_settings):
    params = loop.initial_state(mixed_settings).params
    tokens = jax.random.randint(jax.random.key(1), (1, 40), 0, MIXED_VOCAB)
    segments = jnp.array([[0] * 15 + [1] * 25])
    other = tokens.at[:, :15].set(jax.random.randint(jax.random.key(2), (15,), 0, MIXED_VOCAB))
    first, second = (loss.hidden_states(params, mixed_settings.model, row, segments) for row in (tokens, other))
    assert bool((first[:, 15:] == second[:, 15:]).all())
    assert not bool((first[:, :15] == second[:, :15]).all())
    assert not bool((loss.hidden_states(params, mixed_settings.model, other)[:, 15:] == second[:, 15:]).all())


def test_the_weighted_loss_and_its_gradient_are_those_of_the_formula(mixed_settings):
    params = loop.initial_state(mixed_settings).params
    tokens = jax.random.randint(jax.random.key(1), (3, 21), 0, MIXED_VOCAB)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weights = jax.random.uniform(jax.random.key(2), targets.shape) * 10.0
    segments = jnp.broadcast_to(jnp.arange(20) // 9, targets.shape)

    def attend(layer, q, k, v, memory, softmax):
        return plain_attention(q, k, v, segments), memory

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
        scores, _ = forward(loss.unstack(params), mixed_settings.model, inputs, positions, attend, None)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]
        return (losses * weights).sum() / weights.sum()

    expected, wanted = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(loss.mean_loss), static_argnums=1)(
        params, mixed_settings.model, inputs, targets, weights, segments
    )
    assert float(found) == pytest.approx(float(expected), abs=1e-3)  # bfloat16 rounds logits of size 0.1 to 2^-12
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.03 * jnp.linalg.norm(formula)  # bfloat16: 2^-8 per product


def test_hits_are_where_the_likeliest_token_of_the_plain_model_is_the_target(mixed_settings):
    params = loop.initial_state(mixed_settings).params
    inputs = jax.random.randint(jax.random.key(1), (2, 24), 0, MIXED_VOCAB)

    def attend(layer, q, k, v, memory, softmax):
        return plain_attention(q, k, v, jnp.zeros(inputs.shape, jnp.int32)), memory

    positions = jnp.broadcast_to(jnp.arange(24), inputs.shape)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), loss.unstack(params))
    scores = jax.jit(lambda params: forward(params, mixed_settings.model, inputs, positions, attend, None)[0])(exact)
    best = scores.argmax(axis=-1)
    targets = jnp.where(jnp.arange(24) % 3 == 0, best, (best + 1) % MIXED_VOCAB)
    found = loss.hits(params, mixed_settings.model, inputs, targets)
    assert (found == (jnp.arange(24) % 3 == 0)).mean() > 0.9  # products in bfloat16 may swap the two likeliest


def test_layers_of_several_kinds_are_those_of_the_plain_formula(settings):
    """A window, experts in some layers; the loss has their load balance, and all of them a gradient."""
    experts = dataclasses.replace(EXPERTS, layers=(False, True, True))
    config = dataclasses.replace(settings.model, num_layers=3, windows=(6, None, None), experts=experts)
    assert loss.runs(config) == (range(1), range(1, 3))
    drawn = initialise(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * (8.0 if leaf.ndim > 1 else 1.0), drawn)
    tokens = jax.random.randint(jax.random.key(1), (3, 21), 0, VOCAB)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    behind = jnp.arange(20)[:, None] - jnp.arange(20)

    def attend(layer, q, k, v, memory, softmax):
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
        seen = (behind >= 0) & (behind < (config.windows[layer] or 20))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v), memory

    def mix(layer, own, x, memory):
        """Of each token the weighed sum over all experts, of which all but two weigh nothing."""
        probability = jax.nn.softmax(jnp.einsum("btw,ew->bte", x, own.router))
        likely = probability >= jnp.sort(probability)[..., -2:-1]
        share = jnp.where(likely, probability, 0.0)
        opened = jax.nn.silu(jnp.einsum("btw,efw->btef", x, own.gate.array))
        value = opened * jnp.einsum("btw,efw->btef", x, own.up.array)
        made = jnp.einsum("btef,ewf->btew", value, own.down.array)
        out = jnp.einsum("btew,bte->btw", made, share / share.sum(-1, keepdims=True))
        return out, memory + 6 * jnp.sum(likely.mean((0, 1)) / 2 * probability.mean((0, 1)))

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
        scores, balance = forward(params, config, inputs, positions, attend, jnp.zeros(()), mix)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)
        return losses.mean() + 0.3 * balance / 2

    def found_of(params):
        return loss.mean_loss(loss.stack(params, config), config, inputs, targets, balance=0.3)

    expected, wanted = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(found_of))(params)
    assert float(found) == pytest.approx(float(expected), abs=0.02)  # products in bfloat16
    for layer in (1, 2):
        for name in ("router", "gate", "up", "down"):
            formula, got = (jax.tree.leaves(getattr(tree.layers[layer].experts, name)) for tree in (wanted, gradients))
            assert jnp.linalg.norm(formula[0]) > 0
            assert jnp.linalg.norm(formula[0] - got[0]) <= 0.1 * jnp.linalg.norm(formula[0])
