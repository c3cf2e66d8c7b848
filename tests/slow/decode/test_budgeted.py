"""Prompts read under a budget, against a numpy program that reads whole prompts; neighbours and calls do not matter."""

import dataclasses
import functools

import entropyinfer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, configuration, prompt, request, run, same_bits

from et_jax.control.budget import Budget, CertifiedBudget, ConstantBudget, EntropyBudget, MassBudget
from et_jax.control.controller import Controller
from et_jax.control.switch import AsPrinted
from et_jax.decode.decoder import decoder
from et_jax.models.transformer import forward, initialise
from et_jax.serve.chunks import calls, pack
from et_jax.types import value

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PAGE, CHUNK, LENGTH = 4, 16, 160
THREE = dataclasses.replace(MODEL, num_layers=3, windows=(None,) * 3, max_positions=LENGTH)
LAW = EntropyBudget(tokens=16, segment=CHUNK, dense_until=CHUNK, floor=0.25)
SHARP = ConstantBudget(tokens=8, segment=CHUNK, dense_until=0)


@functools.cache
def weights(model=THREE):
    drawn = initialise(model, jax.random.key(3), jnp.float32)
    return jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), drawn)


@functools.cache
def made(budget, **changes):
    sizes = dict(model=THREE, page_size=PAGE, chunk=CHUNK, prefill_batch=2 * CHUNK, max_length=LENGTH, num_pages=130)
    return decoder(configuration(**sizes | changes, controller=Controller(budget=budget)))


def read(d, tokens, slot=0, state=None, params=None):
    """The state once a prompt but for its last token is read."""
    state = d.empty() if state is None else state
    for rows in calls(d.config, slot, tokens[:-1]):
        state, granted = d.prefill((params or weights(d.config.model),), state, *rows)
        assert granted.all()
    return state


def noted(state):
    assert state.control.prompt is not None
    return state.control.prompt


def cached(d, state, slot, layer):
    """Keys and values of a slot's tokens, "k t d" each."""
    pages = np.asarray(state.plants[0].cache.layers[layer].pages)
    held = np.asarray(state.table.pages)[slot]
    count, width = int(state.length[slot]), d.config.model.head_dim
    rows = pages[:, held].reshape(pages.shape[0], -1, pages.shape[-1])[:, :count]
    return rows[..., :width], rows[..., width : 2 * width]


def reference(model, law, tokens, page, chunk, *, printed=False):
    """Keys and values of every layer, the blocks read, and the masses kept, by whole-prompt attention in numpy."""
    kept, num_read, masses = [], 0, []

    def attend(layer, q, k, v, memory, softmax):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        kept.append((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        count, _, width = q.shape
        groups = q.reshape(count, k.shape[1], -1, width).transpose(1, 2, 0, 3)
        scale, num_segments = width**-0.5, -(-count // chunk)
        scores = entropyinfer.observation(groups, kept[-1][0], chunk, page)
        entropy = entropyinfer.entropies(scores, chunk, page, printed=printed, scale=scale)
        budget = entropyinfer.budgets(
            entropy, law.tokens, gain=law.gain, threshold=law.threshold, floor=law.floor, cap=law.cap
        )
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

    forward(weights(model), model, jnp.asarray([tokens]), jnp.arange(len(tokens))[None], attend, None)
    return kept, num_read, masses


@pytest.mark.parametrize("length", [5 * CHUNK + 1, 8 * CHUNK + 6])
def test_a_prompt_is_read_as_the_paper_has_it(length):
    d, tokens = made(LAW, audit=True), prompt(1, length)
    state = read(d, tokens)
    wanted, num_read, masses = reference(THREE, LAW, tokens[:-1], PAGE, CHUNK)
    for layer in range(THREE.num_layers):
        for got, expected in zip(cached(d, state, 0, layer), wanted[layer], strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    notes = noted(state)
    segments = -(-(length - 1) // CHUNK)
    held = sum(-(-min((s + 1) * CHUNK, length - 1) // PAGE) for s in range(segments))
    assert notes.blocks_held[0] == held * THREE.num_layers * THREE.num_kv_heads
    assert float(notes.blocks_read[0]) == num_read < 0.9 * float(notes.blocks_held[0])
    assert notes.mass is not None and notes.num_probes is not None
    assert notes.num_probes[0] == len(masses)
    assert float(notes.mass[0].sum() / notes.num_probes[0]) == pytest.approx(np.mean(masses), rel=1e-4)
    assert np.mean(masses) < 0.99


def test_the_printed_version_with_its_own_segments():
    model = dataclasses.replace(THREE, max_positions=2600)
    law = EntropyBudget(tokens=256, dense_until=512, printed=True, floor=0.5)
    sizes = dict(model=model, page_size=16, chunk=512, prefill_batch=512, max_length=2600, num_pages=170)
    d, tokens = made(law, **sizes), prompt(2, 2500)
    state = read(d, tokens)
    wanted, num_read, _ = reference(model, law, tokens[:-1], 16, 512, printed=True)
    for got, expected in zip(cached(d, state, 0, 2), wanted[2], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert float(noted(state).blocks_read[0]) == num_read


@pytest.mark.parametrize(
    "budget",
    [
        ConstantBudget(tokens=LENGTH, segment=CHUNK, dense_until=0),
        MassBudget(left=0.0, segment=CHUNK, dense_until=0),
        CertifiedBudget(left=0.0, segment=CHUNK, dense_until=0),
        ConstantBudget(tokens=8, segment=CHUNK, dense_until=LENGTH),
        ConstantBudget(tokens=8, segment=CHUNK, dense_layers=3),
    ],
    ids=["room for all", "all mass", "all certain", "dense so far", "dense layers"],
)
def test_where_everything_is_read_it_is_dense_prefill(budget):
    tokens = prompt(4, 100)
    got, plain = made(budget), made(None)
    states = [read(d, tokens) for d in (got, plain)]
    assert noted(states[0]).blocks_read[0] == noted(states[0]).blocks_held[0]
    for layer in range(THREE.num_layers):
        one, other = (cached(d, state, 0, layer) for d, state in zip((got, plain), states, strict=True))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_less_is_read_and_the_last_segment_reads_everything():
    tokens = prompt(5, 6 * CHUNK + 1)
    some, dense = made(SHARP), made(None)
    states = [read(d, tokens) for d in (some, dense)]
    own, before = CHUNK // PAGE, [s * CHUNK // PAGE for s in range(6)]
    per_head = sum(min(2, n) + own for n in before[:-1]) + before[-1] + own
    held = sum(n + own for n in before)
    notes = noted(states[0])
    assert notes.blocks_read[0] == THREE.num_kv_heads * (held + 2 * per_head)
    assert notes.blocks_held[0] == THREE.num_kv_heads * 3 * held
    one, other = (cached(d, state, 0, 2)[0] for d, state in zip((some, dense), states, strict=True))
    assert np.abs(one - other).max() > 1e-3


def test_a_prompt_is_read_alone_as_in_company():
    d, tokens, beside = made(LAW), prompt(6, 5 * CHUNK + 5), prompt(7, 4 * CHUNK + 9)
    alone = read(d, tokens, slot=1)
    state, queue = d.empty(), []
    for slot, one in ((1, tokens[:-1]), (2, beside[:-1])):
        parts = [one[at : at + CHUNK] for at in range(0, len(one), CHUNK)]
        queue += [(slot, part, part is parts[-1]) for part in parts]
    queue = [queue[i] for i in (6, 0, 1, 7, 2, 8, 9, 3, 4, 10, 5)]
    for at in range(0, len(queue), 2):
        both = queue[at : at + 2]
        ends = [slot for slot, _, last in both if last]
        state, granted = d.prefill((weights(),), state, *pack(d.config, [row[:2] for row in both], ends))
        assert granted.all()
    for layer in range(THREE.num_layers):
        for one, other in zip(cached(d, alone, 1, layer), cached(d, state, 1, layer), strict=True):
            np.testing.assert_array_equal(one, other)
    notes = [jax.tree.map(lambda x: x[1], noted(each)) for each in (alone, state)]
    assert same_bits(*notes)


def test_a_new_prompt_in_a_slot_begins_anew():
    d, tokens = made(LAW), prompt(8, 5 * CHUNK)
    fresh = read(d, tokens)
    used = read(d, prompt(9, 7 * CHUNK))
    again = read(d, tokens, state=d.release(used, 0))
    assert same_bits(*(jax.tree.map(lambda x: x[0], noted(one)) for one in (fresh, again)))


@value
class Counting(Budget):
    """Reads nothing before a segment, and counts segments."""

    def started(self, num_kv_heads):
        return jnp.zeros(num_kv_heads, jnp.int32)

    def choose(self, segment, kept):
        return jnp.zeros(segment.score.shape, bool), kept + 1


def test_rows_of_no_tokens_are_no_segments():
    d = made(Counting(segment=CHUNK))
    state = read(d, prompt(12, 5 * CHUNK))
    np.testing.assert_array_equal(noted(state).kept[0], [[0, 0], [5, 5], [5, 5]])
    np.testing.assert_array_equal(noted(state).kept[1:], 0)


def test_a_text_goes_on_from_what_was_read():
    tokens = prompt(10, 6 * CHUNK + 3)
    texts = {}
    for name, budget in (("sparse", SHARP), ("dense", None)):
        d = made(budget)
        state = d.insert(read(d, tokens), 0, request(tokens[-1], control=d.config.controller, temperature=0.0))
        texts[name] = run(d, weights(), state, 12)[1][0]
    assert len(texts["sparse"].token) == 12
    assert not np.array_equal(texts["sparse"].signals.entropy, texts["dense"].signals.entropy)


def test_layers_with_a_window_read_all_of_it():
    model = dataclasses.replace(THREE, windows=(None, 24, None))
    d = made(SHARP, model=model)
    state = read(d, prompt(11, 6 * CHUNK + 1))
    own, before = CHUNK // PAGE, [s * CHUNK // PAGE for s in range(6)]
    sparse = sum(min(2, n) + own for n in before[:-1]) + before[-1] + own
    held = sum(n + own for n in before)
    assert noted(state).blocks_read[0] == THREE.num_kv_heads * (2 * held + sparse)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(controller=Controller(budget=LAW), chunk=8, prefill_batch=8), "wanted 16"),
        (dict(controller=Controller(budget=dataclasses.replace(LAW, tokens=8))), "at least a block of 4"),
        (
            dict(controller=Controller(budget=LAW, switch=AsPrinted(0.1)), others=(THREE,)),
            "has a prefill budget and switches between two models",
        ),
    ],
)
def test_a_budget_that_does_not_fit_is_refused(changes, sentence):
    sizes = dict(model=THREE, page_size=PAGE, chunk=CHUNK, prefill_batch=2 * CHUNK, max_length=LENGTH, num_pages=130)
    with pytest.raises(ValueError, match=sentence):
        configuration(**sizes | changes)
