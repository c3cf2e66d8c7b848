"""Choosing blocks in the decoder: when they are chosen anew, what is kept and counted for it, what is refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PAGE, configuration, dense, prompt, same_bits, start, weights

from et_jax.control import contribution, refresh, select, tolerance
from et_jax.control.base import chain, unpack_blocks
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.view import mass
from et_jax.decode import decoder as decoding
from et_jax.models.calibration import Calibration
from et_jax.types import Table
from scripts.measuring.selectors import keeping

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SLOT, TOKENS = 2, prompt(7, 29)


@functools.cache
def made(share: float = 0.2, cache_dtype=jnp.float32, laws: tuple = (), **control) -> decoding.Decoder:
    """A decoder that chooses blocks at a tolerance."""
    controller = Controller(law=chain(EmaEntropy(), tolerance.Constant(share), *laws), **control)
    return decoding.decoder(configuration(controller=controller, cache_dtype=cache_dtype, dtype=jnp.float32))


CERTIFIED = select.Certified(select.coded_bounds)


def walk(d, steps: int = 16):
    """Decode greedily step by step: the tokens, each step's signals, and the blocks read, "t l k n"."""
    params = weights()
    state = start(d, params, d.empty(), SLOT, TOKENS, temperature=0.0, limit=steps)
    written, signals, masks = [], [], []
    for _ in range(steps):
        state, output = d.step((params,), state)
        written.append(int(output.token[0, SLOT]))
        signals.append(jax.tree.map(lambda x: np.asarray(x[0, SLOT]), output.signals))
        masks.append(np.asarray(unpack_blocks(state.control.block_mask[SLOT])))
    return state, written, jax.tree.map(lambda *x: np.stack(x), *signals), np.stack(masks)


def test_between_two_refreshes_the_blocks_last_read_are_read_again_and_the_first_layers_may_read_everything():
    _, _, signals, masks = walk(made(selector=select.Quest(2), laws=(refresh.Every(3),), dense_layers=1), steps=10)
    changed = 0
    for t in range(10):
        newest = (len(TOKENS) - 1 + t) // PAGE
        assert masks[t, 0, :, : newest + 1].all() and (masks[t, 1].sum(axis=-1) <= 4).all()
        if t % 3 == 0:
            assert signals.summaries_read[t] == (newest + 1) * MODEL.num_kv_heads
            changed += t > 0 and (masks[t] != masks[t - 1]).any()
        else:
            expected = masks[t - 1].copy()
            expected[..., newest] = True
            np.testing.assert_array_equal(masks[t], expected)
            assert signals.summaries_read[t] == 0
            assert np.isnan(signals.kept_mass[t])
    assert changed
    np.testing.assert_array_equal(signals.blocks_read, masks.sum(axis=(1, 2, 3)))


def test_a_kept_selection_is_the_same_alone_and_beside_a_row_that_selects_at_other_tokens():
    heads = MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size
    sensitivity = Table(np.linspace(0.5, 1.5, math.prod(heads), dtype=np.float32).reshape(heads))
    controller = keeping(preset("adaptive", tolerance=0.5, min_blocks=1, window=4), 3)
    d = decoding.decoder(configuration(controller=controller, calibration=Calibration(sensitivity=sensitivity)))
    params, limit = weights(), 9

    def steps(beside: bool):
        state = start(d, params, d.empty(), SLOT, TOKENS, temperature=0.0, limit=limit)
        seen = []
        for t in range(limit):
            if beside and t == 1:
                state = start(d, params, state, 0, prompt(3, 33), temperature=0.0, limit=limit)
            state, output = d.step((params,), state)
            signals = jax.tree.map(lambda x: np.asarray(x[0, SLOT]), output.signals)
            blocks = np.asarray(unpack_blocks(state.control.block_mask[SLOT]))
            seen.append((output.token[0, SLOT], signals.entropy, signals.summaries_read, signals.kept_mass, blocks))
        return [np.stack(each) for each in zip(*seen, strict=True)]

    alone = steps(beside=False)
    assert same_bits(steps(beside=True), alone)
    _, _, summaries_read, kept_mass, blocks = alone
    selects = np.arange(limit) % 3 == 0
    assert (kept_mass[selects] > 0).all() and np.isnan(kept_mass[~selects]).all()
    np.testing.assert_array_equal(summaries_read > 0, selects)
    newest = (len(TOKENS) - 1 + np.arange(limit)) // PAGE
    assert (blocks.sum(axis=-1) <= newest[:, None, None]).any()
    for t in range(1, limit):
        again = blocks[t - 1] | (np.arange(blocks.shape[-1]) == newest[t])
        assert t % 3 == 0 or np.array_equal(blocks[t], again)


def test_the_surprisal_of_every_token_is_kept_with_its_page():
    """Three chunks of prompt, sixteen tokens written, and a fork: all as the dense model says."""
    d = made(1e-9, selector=select.ActiveSet(contribution.token_nll, mass))
    state, written, _, _ = walk(d)
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


@pytest.mark.parametrize("cache_dtype", [jnp.float32, jnp.int8])
def test_codes_and_the_cache_s_own_bytes_count_in_cost(cache_dtype):
    """A page of codes has one byte a channel and token; scoring one costs that and its summary without the mean key.

    In 8 bits a token has the scales of its key and of its value too.
    """
    _, _, signals, _ = walk(made(selector=CERTIFIED, cache_dtype=cache_dtype), steps=2)
    size = jnp.dtype(cache_dtype).itemsize
    width = 128
    summary = width * (4 if size == 1 else size) + (width - MODEL.head_dim) * 4 + 4 + PAGE * MODEL.head_dim
    token = width * size + (8 if size == 1 else 0)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights()))
    expected = signals.blocks_read * PAGE * token + signals.summaries_read * summary + num_bytes / 3
    np.testing.assert_allclose(signals.cost, expected, rtol=1e-6)
