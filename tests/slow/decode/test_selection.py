"""Choosing blocks in the decoder: what is proved of the mass kept is true, what is left unread is as said."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
    LENGTH,
    MODEL,
    NARROW,
    PAGE,
    configuration,
    dense,
    prompt,
    start,
    weights,
)

from et_jax.control import contribution, select, tolerance
from et_jax.control.base import chain, unpack_blocks
from et_jax.control.controller import Controller
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.view import mass
from et_jax.decode import decoder as decoding
from et_jax.models.transformer import initialise

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SLOT, TOKENS = 2, prompt(7, 29)


@functools.cache
def made(share: float = 0.2, model=MODEL, **control) -> decoding.Decoder:
    """A decoder that chooses blocks at a tolerance."""
    controller = Controller(law=chain(EmaEntropy(), tolerance.Constant(share)), **control)
    return decoding.decoder(configuration(model=model, controller=controller, num_pages=3 * LENGTH // PAGE + 1))


CERTIFIED = select.Certified(select.coded_bounds)


def walk(d, tokens: list[int], steps: int = 16, params=None):
    """Decode greedily step by step: the tokens, each step's signals, and the blocks read, "t l k n"."""
    params = weights() if params is None else params
    state = start(d, params, d.empty(), SLOT, tokens, temperature=0.0, limit=steps)
    written, signals, masks = [], [], []
    for _ in range(steps):
        state, output = d.step((params,), state)
        written.append(int(output.token[0, SLOT]))
        signals.append(jax.tree.map(lambda x: np.asarray(x[0, SLOT]), output.signals))
        masks.append(np.asarray(unpack_blocks(state.control.block_mask[SLOT])))
    return state, written, jax.tree.map(lambda *x: np.stack(x), *signals), np.stack(masks)


def reads(masks, at: int):
    """The positions each step reads, as `dense` asks; before the first step everything, after the last too."""

    def opened(layer: int, i: int) -> list[int]:
        if not at <= i < at + len(masks):
            return list(range(i + 1))
        (each,) = {tuple(mask) for mask in masks[i - at, layer]}
        return [j for j in range(i + 1) if each[j // PAGE]]

    return opened


def test_the_mass_kept_is_at_least_what_is_proved_and_what_was_asked():
    """A layer with a window, and one without; one KV head, so that all heads read what the dense model can be told."""
    model = dataclasses.replace(NARROW, num_kv_heads=1, num_heads=2)
    drawn = initialise(model, jax.random.key(1), jnp.float32)
    params = jax.tree.map(lambda x: x * jnp.float32(8 if x.ndim > 1 else 1), drawn)
    _, written, signals, masks = walk(made(0.3, model, selector=CERTIFIED), TOKENS, params=params)
    at = len(TOKENS) - 1
    _, truth = dense(params, model, TOKENS + written, reads(masks, at))
    truth = truth[at:-1]
    assert np.all(signals.kept_mass <= truth + 1e-5) and signals.kept_mass.min() < 1
    assert np.all(truth >= 1 - 0.3)
    whole = [
        -(-(n + 1) // PAGE) - (max(n + 1 - (w or n + 1), 0) // PAGE) for w in model.windows for n in at + np.arange(16)
    ]
    assert signals.blocks_read.sum() < sum(whole)


def test_between_two_refreshes_the_blocks_last_read_are_read_again():
    _, _, signals, masks = walk(made(selector=select.Quest(2), refresh_every=3), TOKENS, steps=10)
    at = len(TOKENS) - 1
    changed = 0
    for t in range(10):
        newest = (at + t) // PAGE
        if t % 3 == 0:
            assert signals.summaries_read[t] == (newest + 1) * MODEL.num_kv_heads * MODEL.num_layers
            changed += t > 0 and (masks[t] != masks[t - 1]).any()
        else:
            expected = masks[t - 1].copy()
            expected[..., newest] = True
            np.testing.assert_array_equal(masks[t], expected)
            assert signals.summaries_read[t] == 0
            assert signals.kept_mass[t] == signals.kept_mass[t - 1]
    assert changed
    np.testing.assert_array_equal(signals.blocks_read, masks.sum(axis=(1, 2, 3)))


def test_the_first_layers_may_read_everything():
    _, _, _, masks = walk(made(selector=select.Quest(1), dense_layers=1), TOKENS, steps=4)
    for t, mask in enumerate(masks):
        newest = (len(TOKENS) - 1 + t) // PAGE
        assert mask[0, :, : newest + 1].all() and not mask[1].all(axis=-1).any()
        assert (mask[1].sum(axis=-1) <= 2).all()


def test_the_surprisal_of_every_token_is_kept_with_its_page():
    """Three chunks of prompt, sixteen tokens written, and a fork: all as the dense model says."""
    d = made(1e-9, selector=select.ActiveSet(contribution.token_nll, mass))
    state, written, _, _ = walk(d, TOKENS)
    tokens = TOKENS + written
    logits, _ = dense(weights(), MODEL, tokens)
    log_prob = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    truth = np.concatenate([[0.0], -log_prob[np.arange(len(tokens) - 1), tokens[1:]]])
    held = len(tokens) - 1  # the last token is not in the cache yet

    def stored(state, slot):
        return np.asarray(state.plants[0].cache.surprisal[state.table.pages[slot]]).reshape(-1)[:held]

    np.testing.assert_allclose(stored(state, SLOT), truth[:held], atol=2e-4)
    state, granted = d.fork(state, SLOT, 0)
    assert granted
    np.testing.assert_array_equal(stored(state, 0), stored(state, SLOT))


def test_the_last_mass_of_every_block_is_attentions_own():
    """One head, which reads all: a block's share is what the dense model passes over if it reads the others alone."""
    model = dataclasses.replace(NARROW, num_layers=1, windows=(None,), num_kv_heads=1, num_heads=1)
    d = made(model=model, selector=select.ActiveSet(contribution.relative_influence, look_every=1))
    drawn = initialise(model, jax.random.key(1), jnp.float32)
    params = jax.tree.map(lambda x: x * jnp.float32(8 if x.ndim > 1 else 1), drawn)
    state = start(d, params, d.empty(), SLOT, TOKENS, temperature=0.0, limit=16)
    tokens = list(TOKENS)
    for _ in range(5):
        at = len(tokens) - 1
        state, output = d.step((params,), state)
        assert state.control.block_mass is not None
        share = np.asarray(state.control.block_mass[SLOT, 0, 0])
        for block in range(at // PAGE):  # the dense model always reads the newest token itself
            others = [j for j in range(at + 1) if j // PAGE != block]
            reads = {at: others}
            _, kept = dense(params, model, tokens, lambda _, i, reads=reads: reads.get(i, range(i + 1)))
            np.testing.assert_allclose(share[block], 1.0 - kept[at], atol=1e-5)
        np.testing.assert_allclose(share[: at // PAGE + 1].sum(), 1.0, rtol=1e-5)
        assert np.all(share[at // PAGE + 1 :] == 1.0)
        tokens.append(int(output.token[0, SLOT]))


def test_codes_count_in_memory_and_in_cost():
    """A page of codes has one byte a channel and token; looking at one costs that and its summary."""
    with_codes, without = made(selector=CERTIFIED), made(selector=select.Certified(select.chord_bounds))
    held = [sum(x.nbytes for x in jax.tree.leaves(d.empty().plants[0].cache)) for d in (with_codes, without)]
    pages = with_codes.config.num_pages * MODEL.num_kv_heads * MODEL.num_layers
    assert held[0] - held[1] == pages * PAGE * MODEL.head_dim
    _, _, signals, _ = walk(with_codes, TOKENS, steps=2)
    width = 128
    summary = width * 4 * 2 + 4 + PAGE * MODEL.head_dim
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights()))
    expected = signals.blocks_read * PAGE * width * 4 + signals.summaries_read * summary + num_bytes / 3
    np.testing.assert_allclose(signals.cost, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("control", "wanted"),
    [
        ({"selector": select.Certified(lambda view: select.coded_bounds(view))}, "coded_bounds: .* by `needing`"),
        (
            {"selector": select.ActiveSet(lambda view, share: contribution.token_nll(view, share), mass)},
            "token_nll: .* by `needing`",
        ),
        ({"selector": CERTIFIED, "refresh_every": 2}, "refresh_every"),  # a certificate cannot outlive its query
        ({"residual": True, "refresh_every": 2}, "refresh_every"),
        ({"refresh_every": 0}, "refresh_every"),
    ],
)
def test_what_a_selector_cannot_do_is_refused(control, wanted):
    with pytest.raises(ValueError, match=wanted):
        d = made(**control)
        jax.eval_shape(d.step, (weights(),), jax.eval_shape(d.empty))
