"""Prompts read under a budget, against a NumPy program that reads whole prompts."""

import dataclasses
import functools

import entropyinfer
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, configuration, fill, prompt, stored, weights

from et_jax.control.budget import ConstantBudget, EntropyBudget
from et_jax.control.controller import Controller
from et_jax.decode.decoder import decoder
from et_jax.models.transformer import forward

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PAGE, CHUNK, LENGTH = 4, 16, 160
THREE = dataclasses.replace(MODEL, num_layers=3, windows=(None,) * 3, max_positions=LENGTH)
LAW = EntropyBudget(tokens=16, segment=CHUNK, dense_until=CHUNK, floor=0.25)
SHARP = ConstantBudget(tokens=8, segment=CHUNK, dense_until=0)


@functools.cache
def made(budget, **changes):
    sizes = dict(model=THREE, page_size=PAGE, chunk=CHUNK, prefill_batch=2 * CHUNK, max_length=LENGTH, num_pages=130)
    return decoder(configuration(**sizes | changes, controller=Controller(budget=budget)))


def recorded(state):
    assert state.control.prompt is not None
    return state.control.prompt


def cached(d, state, slot, layer):
    """Keys and values of a slot's tokens, "k t d" each."""
    place, held = stored(state, d.config.model, slot, layer)
    pages = np.asarray(place.pages)
    count, width = int(state.length[slot]), d.config.model.head_dim
    rows = pages[:, held].reshape(pages.shape[0], -1, pages.shape[-1])[:, :count]
    return rows[..., :width], rows[..., width : 2 * width]


def reference(model, law, tokens, page, chunk):
    """Keys and values of every layer, the blocks read, and the masses kept, by whole-prompt attention in numpy."""
    kept, num_read, masses = [], 0, []

    def attend(layer, q, k, v, memory, softmax):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        kept.append((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        count, _, width = q.shape
        groups = q.reshape(count, k.shape[1], -1, width).transpose(1, 2, 0, 3)
        scale, num_segments = width**-0.5, -(-count // chunk)
        scores = entropyinfer.observation(groups, kept[-1][0], chunk, page)
        entropy = entropyinfer.entropies(scores, chunk, page, printed=law.printed, scale=scale)
        numbers = {name: getattr(law, name) for name in ("gain", "threshold", "floor", "cap")}
        budget = entropyinfer.budgets(entropy, law.tokens, **numbers)
        budget = np.where(entropyinfer.rigid(entropy, law.rigid_below, online=True), law.tokens, budget)
        best = entropyinfer.best_blocks(scores, np.floor(budget / page), chunk, page)
        out = np.zeros_like(q)
        nonlocal num_read
        for s in range(num_segments):
            start, end = s * chunk, min((s + 1) * chunk, count)
            whole = layer < law.dense_layers or start < law.dense_until or s == num_segments - 1
            for head in range(k.shape[1]):
                opened = np.ones(-(-end // page), bool)
                if not whole:
                    opened[: start // page] = best[head, s, : start // page]
                num_read += opened.sum()
                place = np.flatnonzero(np.repeat(opened, page)[:end])
                for g in range(groups.shape[1]):
                    dense = groups[head, g, start:end] @ k[:end, head].T * scale
                    dense[np.arange(end) > np.arange(start, end)[:, None]] = -np.inf
                    weight = np.exp(dense - dense.max(axis=1, keepdims=True))
                    some = weight[:, place]
                    if not whole:
                        masses.append(some[-1].sum() / weight[-1].sum())
                    out[start:end, head * groups.shape[1] + g] = some @ v[place, head] / some.sum(1, keepdims=True)
        return jnp.asarray(out[None], jnp.float32), memory

    forward(weights(model=model), model, jnp.asarray([tokens]), jnp.arange(len(tokens))[None], attend, None)
    return kept, num_read, masses


@pytest.mark.parametrize(
    ("law", "length"),
    [
        (LAW, 5 * CHUNK + 1),
        (dataclasses.replace(LAW, dense_layers=1), 8 * CHUNK + 6),
        (dataclasses.replace(LAW, printed=True, floor=0.5), 9 * CHUNK + 4),
    ],
)
def test_a_prompt_is_read_as_the_paper_has_it(law, length):
    d, tokens = made(law, audit=True), prompt(1, length)
    state = fill(d, weights(model=THREE), d.empty(), 0, tokens)
    wanted, num_read, masses = reference(THREE, law, tokens[:-1], PAGE, CHUNK)
    for layer in range(THREE.num_layers):
        for got, expected in zip(cached(d, state, 0, layer), wanted[layer], strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    records = recorded(state)
    segments = -(-(length - 1) // CHUNK)
    held = sum(-(-min((s + 1) * CHUNK, length - 1) // PAGE) for s in range(segments))
    assert records.blocks_held[0] == held * THREE.num_layers * THREE.num_kv_heads
    assert float(records.blocks_read[0]) == num_read < 0.9 * float(records.blocks_held[0])
    assert records.mass is not None and records.num_probes is not None
    assert records.num_probes[0] == len(masses)
    assert float(records.mass[0].sum() / records.num_probes[0]) == pytest.approx(np.mean(masses), rel=1e-4)
    assert np.mean(masses) < 0.99


def test_layers_with_a_window_read_all_of_it():
    model = dataclasses.replace(THREE, windows=(None, 24, None))
    d = made(SHARP, model=model)
    state = fill(d, weights(model=model), d.empty(), 0, prompt(11, 6 * CHUNK + 1))
    own, before = CHUNK // PAGE, [s * CHUNK // PAGE for s in range(6)]
    sparse = sum(min(2, n) + own for n in before[:-1]) + before[-1] + own
    held = sum(n + own for n in before)
    assert recorded(state).blocks_read[0] == THREE.num_kv_heads * (2 * held + sparse)
