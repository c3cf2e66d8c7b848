"""A sequence whose cache is compressed reads what is kept and nothing else, gives pages back, and disturbs no one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import kept_entries
import numpy as np
import pytest
from small_model import (
    LENGTH,
    MODEL,
    NARROW,
    PAGE,
    configuration,
    dense_forward,
    prompt,
    same_bits,
    start,
    stored,
    weights,
)

from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.control.select import Certified, coded_bounds
from et_jax.decode import decoder as decoding
from et_jax.decode.state import DecodeState
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

BUDGET, WINDOW, GAP = 16, 6, 3
POOL = 49  # every slot may hold all it can
MODELS = {"plain": MODEL, "narrow": NARROW}
TOKENS = prompt(11, 41)


@functools.cache
def compressing(name: str, every: int = 0, model: str = "plain", **changes) -> decoding.Decoder:
    how = named(name, BUDGET, window=WINDOW, gap=GAP, every=every)
    changes = {"num_pages": POOL, "keep": frozenset({"logits"})} | changes
    return decoding.decoder(configuration(model=MODELS[model], compression=how, **changes))


def room_of(d: decoding.Decoder) -> int:
    assert d.config.layout is not None
    return d.config.layout.region * PAGE


def points(d: decoding.Decoder, num_prompt: int) -> list[int]:
    """The lengths at which a sequence of so many prompt tokens is compressed."""
    how, room, found, shift = d.config.compression, room_of(d), [], 0
    assert how is not None
    while (point := how.point(num_prompt, shift, room)) is not None and point < LENGTH:
        found.append(point)
        shift = point - room
    return found


def decoded(d, params, slot: int, tokens: list[int], steps: int, **asked):
    """The state after so many steps of a sequence alone, the tokens in its cache, and the logits of each step.

    It is compressed wherever its point has come.
    """
    state, due = start(d, params, d.empty(), slot, tokens, limit=LENGTH - len(tokens), **asked), points(d, len(tokens))
    text, logits = list(tokens), []
    for _ in range(steps):
        if int(state.length[slot]) in due:
            state, granted = d.compress(state, slot)
            assert granted and int(state.num_cached[slot]) == room_of(d)
        state, _ = d.step((params,), state)
        text.append(int(state.token[slot]))
        logits.append(np.asarray(state.logits[slot]))
    return state, text[:-1], np.stack(logits)


def reference(name: str, model, params, text: list[int], at: list[int], room: int):
    """Of a text that is compressed at these lengths the logits, the keys, and the positions that each head holds then.

    All in NumPy but the model.
    """
    layers, heads = model.num_layers, model.num_kv_heads
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    reads = np.tile(causal, (layers, heads, 1, 1))
    of_query_heads = functools.partial(np.repeat, repeats=model.group_size, axis=1)
    padded = jnp.asarray(text + [0] * (LENGTH - len(text)), jnp.int32)
    held = [[list(range(len(text))) for _ in range(heads)] for _ in range(layers)]
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    for layer, window in enumerate(model.windows):
        reads[layer] &= behind < (window or LENGTH)
    blocks = named(name, BUDGET, window=WINDOW).layout(PAGE, model.windows).layers
    for length in at:
        _, (_, memory) = dense_forward(model)(params, padded, of_query_heads(reads))
        for layer in range(layers):
            query, key = (np.asarray(x) for x in memory[layer])
            queries = query[length - WINDOW : length].reshape(WINDOW, -1, model.head_dim)
            now = [[place for place in each if place < length] for each in held[layer]]
            keys = [key[each, head] for head, each in enumerate(now)]
            number = blocks[layer]
            if number is None:
                kept = [each[-room:] for each in now]
            elif name == "streaming":
                kept = [each[:4] + each[4 - BUDGET :] for each in now]
            else:
                budget = number * PAGE
                found = kept_entries.kept(name, keys, queries, budget=budget, window=WINDOW, pooling=5, page=PAGE)
                kept = [[each[i] for i in chosen] for each, chosen in zip(now, found, strict=True)]
            held[layer] = [[*each, *range(length, len(text))] for each in kept]
            for head, each in enumerate(held[layer]):
                reads[layer, head, length:] &= np.isin(np.arange(LENGTH), each) | (np.arange(LENGTH) >= len(text))
    logits, (_, memory) = dense_forward(model)(params, padded, of_query_heads(reads))
    return np.asarray(logits[0, : len(text)]), [np.asarray(key) for _, key in memory], held


@pytest.mark.parametrize(
    ("name", "model", "every"),
    [("adakv", "plain", 8), ("adakv", "narrow", 8), ("pyramidkv", "narrow", 0), ("streaming", "plain", 8)],
)
def test_decoding_is_that_of_a_dense_model_which_reads_what_is_kept(name, model, every):
    d, params = compressing(name, every, model), weights()
    at = [point for point in points(d, len(TOKENS)) if point < len(TOKENS) + 18]
    assert len(at) == (1 if not every else 2)
    state, text, logits = decoded(d, params, 1, TOKENS, 18, temperature=0.0)
    expected, own, held = reference(name, MODELS[model], params, text, at, room_of(d))
    np.testing.assert_allclose(logits, expected[len(TOKENS) - 1 :], rtol=1e-3, atol=1e-3)
    whole, _, _ = reference(name, MODELS[model], params, text, [], room_of(d))
    ahead = at[0] - len(TOKENS) + 1  # the first step that reads what is kept
    np.testing.assert_allclose(logits[:ahead], whole[len(TOKENS) - 1 : at[0]], rtol=1e-3, atol=1e-3)
    assert np.abs(logits[ahead:] - whole[at[0] :]).max() > 0.1

    shift = len(text) - int(state.num_cached[1])
    assert shift == at[-1] - room_of(d) and int(state.table.num_blocks[1]) == -(-(len(text) - shift) // PAGE)
    signals, blocks = state.signals, int(state.table.num_blocks[1])
    assert int(signals.allocated_pages[1]) == blocks and int(signals.length[1]) == len(text)
    if model == "plain":  # heads that keep fewer blocks read fewer: the sum over heads is that of equal budgets
        new = blocks - room_of(d) // PAGE
        assert int(signals.blocks_read[1]) == MODEL.num_layers * MODEL.num_kv_heads * (BUDGET // PAGE + new)
    skipped = state.plants[0].skipped
    for layer, head in itertools.product(range(MODEL.num_layers), range(MODEL.num_kv_heads)):
        first = 0 if skipped is None else int(skipped[1, layer, head]) * PAGE
        cached, table = stored(state, MODELS[model], 1, layer)
        pages = np.asarray(cached.pages[head, table])
        keys = pages.reshape(-1, pages.shape[-1])[first : len(text) - shift, : MODEL.head_dim]
        np.testing.assert_allclose(keys, own[layer][held[layer][head], head], rtol=1e-3, atol=1e-3)


def test_a_sequence_that_fits_its_region_stays_as_it_is():
    d, params, tokens = compressing("latent", 8), weights(), prompt(12, 5)
    assert points(d, len(tokens))[0] == BUDGET + 8
    state = start(d, params, d.empty(), 1, tokens, limit=20)
    for _ in range(12):
        state, _ = d.step((params,), state)
    before = jax.tree.map(np.asarray, state)
    state, granted = d.compress(state, 1)
    assert granted and same_bits(before, state)


def test_where_pages_are_short_nothing_changes():
    """A fork holds every page of its source, and no page is free: the source's region has no room."""
    d, params = compressing("latent", 8), weights()
    tokens = prompt(13, 45)
    state = start(d, params, d.empty(), 0, tokens, limit=19)
    for _ in range(4):
        state, _ = d.step((params,), state)  # 48 tokens, twelve full pages
    state, granted = d.fork(state, 0, 1)
    assert granted and int(state.table.num_free) == POOL - 1 - 12
    state = replace(state, table=replace(state.table, num_free=jnp.int32(0)))
    before = jax.tree.map(np.asarray, state)
    state, granted = d.compress(state, 0)
    assert not granted and same_bits(before, state)
    state = d.release(state, 1)
    state, granted = d.compress(state, 0)
    assert granted and int(state.table.num_free) == 8


def entries(state: DecodeState, layer: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers "k t e" and the scales "k t 2" that slot 1 holds in a layer, in the order of places."""
    cached, table = stored(state, MODEL, 1, layer)
    assert cached.kv_scales is not None
    pages, scales = np.asarray(cached.pages[:, table]), np.asarray(cached.kv_scales[:, table]).swapaxes(2, 3)
    heads = len(pages)
    return pages.reshape(heads, -1, pages.shape[-1])[:, :num_tokens], scales.reshape(heads, -1, 2)[:, :num_tokens]


def test_entries_in_8_bits_are_moved_with_their_scales():
    """Each head holds tokens that it had, bit for bit and in order; boxes and codes are of what they are read as."""
    selector = Controller(selector=Certified(coded_bounds))
    d, params = compressing("latent", cache_dtype=jnp.int8, dtype=jnp.float32, controller=selector), weights()
    state = start(d, params, d.empty(), 1, TOKENS, temperature=0.0, limit=20)
    while int(state.length[1]) < points(d, len(TOKENS))[0]:
        state, _ = d.step((params,), state)
    length, room = int(state.length[1]), room_of(d)
    before = [entries(state, layer, length) for layer in range(MODEL.num_layers)]
    state, granted = d.compress(state, 1)
    assert granted and room < length
    for layer, (numbers, scales) in enumerate(before):
        for head, kept, kept_scales in zip(range(MODEL.num_kv_heads), *entries(state, layer, room), strict=True):
            had = [(one.tobytes(), scale.tobytes()) for one, scale in zip(numbers[head], scales[head], strict=True)]
            at = [had.index((one.tobytes(), scale.tobytes())) for one, scale in zip(kept, kept_scales, strict=True)]
            assert at == sorted(set(at)) and len(at) == room
            key = kept[:, : MODEL.head_dim].astype(np.float32) * kept_scales[:, :1]
            key = key.reshape(-1, PAGE, MODEL.head_dim)
            (cached, pages), low, high = stored(state, MODEL, 1, layer), key.min(1), key.max(1)
            table = pages[: room // PAGE]
            box = np.asarray(cached.summaries.key_box[head, table])[:, : 2 * MODEL.head_dim]
            np.testing.assert_array_equal(box, np.concatenate([low, high], axis=-1))
            assert cached.key_codes is not None
            codes = np.asarray(cached.key_codes[head, table], np.float32).reshape(key.shape)
            step = (high - low)[:, None] / 255
            np.testing.assert_allclose(low[:, None] + (codes + 128) * step, key, atol=1.01 * float(step.max()) / 2)
