"""A step: what it reads, reports and refuses, when decoding stops, and what laws, rules and priorities make of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exact import log_softmax, surprisal_moments
from small_model import (
    CHUNK,
    MODEL,
    PAGE,
    PROMPTS,
    VOCABULARY,
    a_little_warmer,
    by_entropy,
    configuration,
    dense,
    even_blocks,
    fill,
    paged_texts,
    prompt,
    run,
    same_bits,
    start,
    text_of,
    texts,
    weights,
)

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.select import SinksWindow
from et_jax.decode import decoder as decoding
from et_jax.models.weights import Dense
from et_jax.serve.chunks import pack
from et_jax.types import replace

CONTROLLERS = {
    "plain": Controller(),
    "sparse": Controller(selector=(SinksWindow(2, 6), even_blocks)),
    "own": Controller(law=chain(FallClock(), by_entropy), temperature_rule=a_little_warmer),
}


@functools.cache
def made(name: str) -> decoding.Decoder:
    return decoding.decoder(configuration(controller=CONTROLLERS[name]))


def row_of(state, slot: int):
    """Everything of one slot but the count of its waiting and the score that waiting changes."""
    fields = ("token", "length", "generated", "limit", "active", "arrival", "sampling", "signals")
    rows = {name: getattr(state, name) for name in fields}
    rows |= {name: x for name, x in vars(state.control).items() if name not in ("wait", "priority")}
    rows |= {"pages": state.table.pages, "blocks": state.table.num_blocks}
    return jax.tree.map(lambda x: np.array(x[slot]), rows)


def opened_blocks(length_of_prompt: int):
    """What the selectors of "sparse" open: the prompt is read densely, the text by blocks of the cache."""

    def opened(layer: int, i: int):
        length, newest = i + 1, i // PAGE
        if i < length_of_prompt - 1:
            return range(length)
        for_layer = (
            lambda block: block * PAGE < 2 or min((block + 1) * PAGE, length) > length - 6,
            lambda block: block % 2 == 0,
        )
        blocks = [block for block in range(newest + 1) if block == newest or for_layer[layer](block)]
        return [j for block in blocks for j in range(block * PAGE, min((block + 1) * PAGE, length))]

    return opened


def test_text_from_selected_blocks_equals_the_dense_model_with_the_others_masked():
    """What is reported as read is, layer by layer and head by head, what the selectors open."""
    d, c = decoding.decoder(replace(made("sparse").config, trace_reads=True)), MODEL
    rows = paged_texts(d, weights(), temperature=0.0)
    assert texts(rows) != texts(paged_texts(made("plain"), weights(), temperature=0.0))
    for slot, tokens in PROMPTS.items():
        written, signals = rows[slot].token.tolist(), rows[slot].signals
        opened = opened_blocks(len(tokens))
        logits, kept = dense(weights(), c, tokens + written, opened)
        at = np.arange(len(tokens) - 1, len(tokens) + len(written) - 1)
        assert logits[at].argmax(axis=-1).tolist() == written
        read = [[len({j // PAGE for j in opened(layer, i)}) for layer in range(c.num_layers)] for i in at]
        assert rows[slot].reads.tolist() == [[[one] * c.num_kv_heads for one in layers] for layers in read]
        blocks = np.sum(read, axis=1) * c.num_kv_heads
        assert signals.blocks_read.tolist() == blocks.tolist()
        # What is unread counts by its mean key, which by Jensen's inequality is never too much.
        assert (signals.kept_mass >= kept[at] - 1e-5).all() and (signals.kept_mass <= 1).all()
        assert (signals.kept_mass[blocks < c.num_layers * c.num_kv_heads * (at // PAGE + 1)] < 1).all()


def test_the_signals_are_those_of_the_dense_logits():
    """Entropy, varentropy, surprisal in float64 from dense logits; cost from bytes counted by hand."""
    temperature = 0.7
    rows = paged_texts(made("plain"), weights(), temperature=temperature, top_k=20)
    num_bytes = sum(np.prod(x.shape) * 4 for x in jax.tree.leaves(weights()))
    width = 128  # one lane holds the 8 + 8 numbers of a token
    for slot, tokens in PROMPTS.items():
        written, signals = rows[slot].token, rows[slot].signals
        at = np.arange(len(tokens) - 1, len(tokens) + len(written) - 1)
        logits = dense(weights(), MODEL, tokens + written.tolist())[0][at]

        entropy, varentropy = surprisal_moments(logits)
        warm = surprisal_moments(logits, temperature)
        ranked = np.sort(logits, axis=-1)
        clear = ranked[:, -20] - ranked[:, -21] > 1e-4  # elsewhere float32 may keep another token
        cut = surprisal_moments(np.where(logits >= ranked[:, -20:-19], logits / temperature, -np.inf))
        close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
        close(signals.entropy, entropy)
        close(signals.entropy_low, entropy)
        close(signals.entropy_high, entropy)
        close(signals.varentropy, varentropy)
        close(signals.surprisal, -log_softmax(logits)[np.arange(len(written)), written])
        close(signals.margin, np.diff(np.sort(logits, axis=-1)[:, -2:], axis=-1)[:, 0])
        close(signals.tempered_entropy, warm[0])
        close(signals.tempered_varentropy, warm[1])
        assert clear.mean() > 0.8
        close(signals.truncated_entropy[clear], cut[0][clear])
        blocks = (at // PAGE + 1) * MODEL.num_layers * MODEL.num_kv_heads
        assert signals.blocks_read.tolist() == blocks.tolist()
        np.testing.assert_allclose(signals.cost, blocks * PAGE * width * 4 + num_bytes / 3, rtol=1e-6)
        assert signals.length.tolist() == (at + 1).tolist()
        assert signals.generated.tolist() == list(range(1, 13))
        assert signals.remaining.tolist() == list(range(11, -1, -1))
        assert signals.allocated_pages.tolist() == (at // PAGE + 1).tolist()
        np.testing.assert_array_equal(signals.kept_mass, 1)
        np.testing.assert_array_equal(rows[slot].temperature, np.float32(temperature))
        np.testing.assert_allclose(rows[slot].total_cost, np.cumsum(signals.cost), rtol=1e-5)
        falls = np.maximum(-np.diff(entropy, prepend=0), 0)
        np.testing.assert_allclose(rows[slot].entropic_time, np.cumsum(falls), atol=1e-3)


def test_a_refused_step_changes_nothing_and_the_text_goes_on_when_a_page_is_free():
    """15 + 9 pages are all there are. The last slot's sequence stands at the end of a page and needs another."""
    d, params = made("plain"), weights()
    tokens, asked = prompt(3, 5), dict(seed=3, limit=6)
    expected = text_of(d, params, 2, tokens, **asked)
    state = start(d, params, d.empty(), 2, tokens, **asked)
    state = fill(d, params, state, 0, prompt(4, 60))
    state = fill(d, params, state, 1, prompt(5, 33))
    assert int(state.table.num_free) == 0
    before, cache = row_of(state, 2), jax.tree.map(np.array, state.plants[0].cache)
    for wait in (1, 2):
        state, output = d.step((params,), state)
        assert output.refused[0].tolist() == [False, False, True] and not output.produced.any()
        assert same_bits(row_of(state, 2), before) and same_bits(state.plants[0].cache, cache)
        assert int(state.control.wait[2]) == wait
    state = d.release(state, 1)
    state, rows = run(d, params, state)
    assert texts(rows)[2] == expected
    assert int(state.control.wait[2]) == 0


def test_logits_that_are_no_numbers_end_their_row_alone():
    """A token whose embedding is NaN spoils its own sequence: not the others, nor the next on its pages."""
    d, params = made("plain"), weights()
    expected = {slot: text_of(d, params, slot, PROMPTS[slot], seed=slot) for slot in PROMPTS}
    written = set(itertools.chain(*expected.values(), *PROMPTS.values()))
    poison = next(token for token in range(VOCABULARY) if token not in written)
    broken = replace(params, embedding=Dense(array=params.embedding.array.at[poison].set(jnp.nan)))
    state = start(d, broken, d.empty(), 1, [*prompt(1, 6)[:5], poison], seed=9)
    for slot in (0, 2):
        state = start(d, broken, state, slot, PROMPTS[slot], seed=slot)
    before = row_of(state, 1)
    state, output = d.step((broken,), state)
    assert (output.fault[0] > 0).tolist() == [False, True, False] and output.produced[0].tolist() == [True, False, True]
    assert not state.active[1] and not output.finished.any()
    assert before.pop("active") and before.pop("blocks") == 2
    assert same_bits({name: x for name, x in row_of(state, 1).items() if name in before}, before)
    state, rows = run(d, broken, state)
    for slot in (0, 2):
        assert [int(output.token[0, slot]), *texts(rows)[slot]] == expected[slot]
    state = d.release(state, 1)
    _, rows = run(d, broken, start(d, broken, state, 1, PROMPTS[1], seed=1))
    assert texts(rows)[1] == expected[1]


def test_a_law_and_a_temperature_rule_of_ones_own_set_the_temperature_but_of_a_greedy_sequence():
    """The law sets the next step from this entropy, the rule adds to it from the entropy of the very step."""
    d, params = made("own"), weights()
    state = start(d, params, d.empty(), 0, PROMPTS[0], temperature=1.5)
    _, rows = run(d, params, start(d, params, state, 2, PROMPTS[2], temperature=0.0))
    h = rows[0].signals.entropy
    law = np.concatenate([[1.5], 0.5 + 0.1 * h[:-1]])
    np.testing.assert_allclose(rows[0].temperature, law + 0.01 * h, rtol=1e-5)
    np.testing.assert_array_equal(rows[2].temperature, 0)
    np.testing.assert_array_equal(rows[2].signals.tempered_entropy, 0)
    assert rows[2].token.tolist() == text_of(made("plain"), params, 2, PROMPTS[2], temperature=0.0)


def test_decoding_stops_when_no_sequence_is_active_or_one_ends_where_that_is_asked():
    d, params = made("plain"), weights()
    for until_end, expected in ((True, 2), (False, 9)):
        state = start(d, params, d.empty(), 0, [5], limit=2)
        state = start(d, params, state, 1, [6], limit=9)
        state, output, ran = d.decode((params,), state, 32, np.bool_(until_end))
        assert int(ran) == expected and output.finished[:2, 0, 0].tolist() == [False, True]
    _, _, ran = d.decode((params,), state, 32)
    assert int(ran) == 0
    assert not start(d, params, d.empty(), 1, PROMPTS[0], limit=0).active.any()


def test_what_is_refused_or_of_no_tokens_changes_nothing_and_a_fork_of_full_pages_needs_none():
    """It has a future of its own."""
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = start(d, params, state, 1, prompt(5, 36))  # 35 tokens: the last of nine pages is partial
    assert int(state.table.num_free) == 0
    before = jax.tree.map(np.asarray, state)
    state, granted = d.fork(state, 1, 2)
    assert not granted and same_bits(state, before)
    for slot, tokens in ((2, range(CHUNK)), (1, [])):
        state, granted = d.prefill((params,), state, *pack(d.config, [(slot, tokens)]))
        assert granted.all() == (slot == 1) and same_bits(state, before)
    state, granted = d.write_row(state, 2, jax.device_get(d.read_row(state, 1)))
    assert not granted and same_bits(state, before)
    assert not any(np.asarray(layer.pages[:, 0]).any() for layer in state.plants[0].cache.layers)  # the null page
    state = d.release(state, 1)
    state = start(d, params, state, 1, prompt(5, 33))  # 32 tokens: eight full pages
    state, granted = d.fork(state, 1, 2)
    assert granted and state.table.pages[2].tolist() == state.table.pages[1].tolist()
    _, rows = run(d, params, d.release(state, 0))
    assert len(rows[1].token) == len(rows[2].token) == 12 and texts(rows)[1] != texts(rows)[2]
