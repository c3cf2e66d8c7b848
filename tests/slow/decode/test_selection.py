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
    PROMPTS,
    configuration,
    dense,
    paged_texts,
    prompt,
    same_bits,
    start,
    texts,
    weights,
)

from et_jax.control import bounds, contribution, select, tolerance
from et_jax.control.base import chain, unpack_blocks
from et_jax.control.controller import Controller
from et_jax.control.selector import Selection
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.view import mass
from et_jax.decode import decoder as decoding
from et_jax.decode import selection
from et_jax.models.transformer import initialise

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SLOT, TOKENS = 2, prompt(7, 29)
BOUNDS = {"box": select.box_bounds, "chord": select.chord_bounds, "coded": select.coded_bounds}


@functools.cache
def made(name: str = "dense", model=MODEL, share: float = 0.2, page_size: int = PAGE, **control) -> decoding.Decoder:
    """A decoder that prunes by a certificate, or reads everything."""
    law = chain(EmaEntropy(), tolerance.Constant(share))
    if name in BOUNDS:
        control |= {"selector": select.Certified(BOUNDS[name])}
    controller = Controller(**{"law": law} | control)
    num_pages = 3 * LENGTH // page_size + 1
    return decoding.decoder(configuration(model=model, controller=controller, page_size=page_size, num_pages=num_pages))


def walk(d, tokens: list[int], steps: int = 16):
    """Decode greedily step by step: the tokens, each step's signals, and the blocks read, "t l k n"."""
    state = start(d, weights(), d.empty(), SLOT, tokens, temperature=0.0, limit=steps)
    written, signals, masks = [], [], []
    for _ in range(steps):
        state, output = d.step((weights(),), state)
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


@pytest.mark.parametrize("name", BOUNDS)
def test_the_mass_kept_is_at_least_what_is_proved_and_what_was_asked(name):
    """A layer with a window, and one without; one KV head, so that all heads read what the dense model can be told."""
    model = dataclasses.replace(NARROW, num_kv_heads=1, num_heads=2)
    d = made(name, model=model, share=0.3)
    drawn = initialise(model, jax.random.key(1), jnp.float32)
    params = jax.tree.map(lambda x: x * jnp.float32(8 if x.ndim > 1 else 1), drawn)
    state = start(d, params, d.empty(), SLOT, TOKENS, temperature=0.0, limit=16)
    written, kept, masks, read = [], [], [], []
    for _ in range(16):
        state, output = d.step((params,), state)
        written.append(int(output.token[0, SLOT]))
        kept.append(float(output.signals.kept_mass[0, SLOT]))
        read.append(int(output.signals.blocks_read[0, SLOT]))
        masks.append(np.asarray(unpack_blocks(state.control.block_mask[SLOT])))
    at = len(TOKENS) - 1
    _, truth = dense(params, model, TOKENS + written, reads(np.stack(masks), at))
    truth = truth[at:-1]
    assert np.all(np.asarray(kept) <= truth + 1e-5)
    assert np.all(truth >= 1 - 0.3)
    if name == "coded":  # box and chord are too wide to close anything on weights like these
        whole = [
            sum(-(-(n + 1) // PAGE) - (max(n + 1 - (w or n + 1), 0) // PAGE) for w in model.windows)
            for n in range(at, at + 16)
        ]
        assert sum(read) < sum(whole)
        assert min(kept) < 1


def test_tolerance_zero_is_dense_bit_for_bit():
    plain, careful = (paged_texts(d, weights(), temperature=0.9) for d in (made(), made("chord", share=0.0)))
    assert texts(plain) == texts(careful)
    for slot in PROMPTS:
        assert same_bits(plain[slot].signals.entropy, careful[slot].signals.entropy)
        assert same_bits(plain[slot].signals.blocks_read, careful[slot].signals.blocks_read)


def test_with_one_token_a_page_the_residual_makes_up_for_all_that_was_left_out():
    """Every page is then its own mean, so pruned attention with the residual is dense attention."""
    pruned = select.SinksWindow(1, 2)
    _, written, signals, _ = walk(made(), TOKENS)
    _, same, close, masks = walk(made(page_size=1, selector=pruned, residual=True), TOKENS)
    _, other, _, _ = walk(made(page_size=1, selector=pruned), TOKENS)
    assert masks.sum() < 0.3 * masks.shape[0] * 4 * len(TOKENS)
    assert same == written and other != written
    np.testing.assert_allclose(close.entropy, signals.entropy, atol=2e-4)


@pytest.mark.parametrize("sink", [None, 2.0])
def test_the_residual_is_its_formula_and_errs_no_more_than_its_bound(sink):
    """With a sink too, whose share is in every sum that an output is divided by."""
    sunk = 0.0 if sink is None else np.exp(sink)
    rng = np.random.default_rng(3)
    k, g, n, s, d = 2, 3, 7, 4, 5
    key, value = rng.normal(size=(2, 1, k, n, s, d))
    query = rng.normal(size=(1, k, g, d))
    opened = rng.uniform(size=(1, k, n)) < 0.4
    score = np.einsum("bkgd,bknsd->bkgns", query, key)
    each, mean = np.exp(score).sum(-1), value.mean(-2)
    guess = s * np.exp(np.einsum("bkgd,bknd->bkgn", query, key.mean(-2)))
    top = np.einsum("bkgns,bknsd->bkgnd", np.exp(score), value)
    shut = ~opened[:, :, None]
    read = np.where(shut, 0, each).sum(-1) + sunk
    out = np.where(shut[..., None], 0, top).sum(-2) / np.maximum(read, 1e-30)[..., None]
    whole = (out * read[..., None] + np.einsum("bkgn,bknd->bkgd", np.where(shut, guess, 0), mean)) / (
        read + np.where(shut, guess, 0).sum(-1)
    )[..., None]
    blocks = selection.Blocks(
        table=jnp.arange(n, dtype=jnp.int32)[None],
        length=jnp.full(1, n * s, jnp.int32),
        start=jnp.arange(n, dtype=jnp.int32) * s,
        num_tokens=jnp.full((1, n), s, jnp.int32),
        readable=jnp.ones((1, n), bool),
        certain=jnp.zeros((1, n), bool),
    )
    single = functools.partial(jnp.asarray, dtype=jnp.float32)
    chosen = Selection(opened=jnp.asarray(opened), estimate=single(np.log(guess)), upper=None)
    with np.errstate(divide="ignore"):
        log_read = single(np.log(read))
    stored = single(np.concatenate([key.mean(-2), mean], axis=-1)[0])  # a page's mean key, then its mean value
    got = selection.with_residual(single(out), chosen, blocks, log_read, stored)
    np.testing.assert_allclose(got, whole, atol=1e-5)

    truth = top.sum(-2) / (each.sum(-1) + sunk)[..., None]
    radius = np.linalg.norm(value - mean[..., None, :], axis=-1).max(-1)
    apart = np.linalg.norm(mean[:, :, None] - whole[..., None, :], axis=-1)
    for head in range(k):
        interval = bounds.Interval(low=single(np.log(guess[0, head])), high=single(np.log(each[0, head]) + 1e-5))
        bound = bounds.residual_error(
            interval,
            chosen.estimate[0, head],
            chosen.opened[0, head],
            log_read[0, head],
            single(apart[0, head]),
            single(radius[0, head]),
        )
        error = np.linalg.norm(truth - whole, axis=-1)[0, head]
        assert np.all(error <= bound)
        by_hand = (
            np.where(shut[0, head], each * radius[:, :, None] + (each - guess) * apart, 0)[0, head].sum(-1)
            / (read + np.where(shut, guess, 0).sum(-1))[0, head]
        )
        np.testing.assert_allclose(bound, by_hand, rtol=1e-3)


def test_between_two_refreshes_the_blocks_last_read_are_read_again():
    d = made(selector=select.Quest(2), refresh_every=3)
    _, _, signals, masks = walk(d, TOKENS, steps=10)
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
    d = made(selector=select.ActiveSet(contribution.token_nll, mass), share=1e-9)
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


def test_the_papers_reading_by_token_surprisal_opens_what_its_formula_says():
    d = made(selector=select.ActiveSet(contribution.token_nll, mass), share=0.5)
    _, _, _, masks = walk(d, TOKENS, steps=4)
    assert 0 < masks[..., : len(TOKENS) // PAGE].mean() < 1


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


def test_what_a_selector_reads_and_does_not_say_that_it_needs_is_named():
    for selector, wanted in (
        (select.Certified(lambda view: select.coded_bounds(view)), "coded_bounds: .* by `needing`"),
        (select.ActiveSet(lambda view, share: contribution.token_nll(view, share), mass), "token_nll: .* by `needing`"),
    ):
        with pytest.raises(ValueError, match=wanted):
            jax.eval_shape(made(selector=selector).step, (weights(),), jax.eval_shape(made(selector=selector).empty))


def test_a_certificate_cannot_outlive_its_query():
    d = made("chord", refresh_every=2)
    with pytest.raises(ValueError, match="refresh_every"):
        jax.eval_shape(d.step, (weights(),), jax.eval_shape(d.empty))
    with pytest.raises(ValueError, match="refresh_every"):
        Controller(residual=True, refresh_every=2)
    with pytest.raises(ValueError, match="refresh_every"):
        Controller(refresh_every=0)


def test_codes_count_in_memory_and_in_cost():
    """A page of codes has one byte a channel and token; looking at one costs that and its summary."""
    with_codes, without = made("coded"), made("chord")
    held = [sum(x.nbytes for x in jax.tree.leaves(d.empty().plants[0].cache)) for d in (with_codes, without)]
    pages = with_codes.config.num_pages * MODEL.num_kv_heads * MODEL.num_layers
    assert held[0] - held[1] == pages * PAGE * MODEL.head_dim
    _, _, signals, _ = walk(with_codes, TOKENS, steps=2)
    width = 128
    summary = width * 4 * 2 + 4 + PAGE * MODEL.head_dim
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights()))
    expected = signals.blocks_read * PAGE * width * 4 + signals.summaries_read * summary + num_bytes / 3
    np.testing.assert_allclose(signals.cost, expected, rtol=1e-6)
