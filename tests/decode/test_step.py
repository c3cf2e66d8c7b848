"""The hall: paged text equals dense text, neighbours do not matter, what is refused changes nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import (
    CHUNK,
    MODEL,
    NARROW,
    PAGE,
    POOL,
    PROMPTS,
    VOCABULARY,
    configuration,
    dense,
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
from et_jax.control.priority import Aged
from et_jax.control.select import SinksWindow
from et_jax.decode import decoder as decoding
from et_jax.models.transformer import initialise
from et_jax.serve.chunks import pack
from et_jax.types import replace

# A user's own doors, five lines or fewer each.


def by_entropy(signals, state):
    return replace(state, temperature=0.5 + 0.1 * signals.entropy)


def a_little_warmer(moments_at, signals, state):
    entropy, _ = moments_at(jnp.float32(1.0))
    return state.temperature + 0.01 * entropy


def first_come(signals, state):
    return 1000.0 - signals.arrival.astype(jnp.float32)


def even_blocks(view):
    return (view.start // PAGE) % 2 == 0


@functools.cache
def made(name: str) -> decoding.Decoder:
    """The decoders of this module, each compiled once."""
    own = Controller(law=chain(FallClock(), by_entropy), temperature_rule=a_little_warmer)
    sparse = Controller(selector=(SinksWindow(2, 6), even_blocks))
    queue = Controller(priority=Aged(first_come, ceiling=1000.0, rate=0.5))
    changes = {
        "plain": {},
        "narrow": {"model": NARROW},
        "bfloat16": {"cache_dtype": jnp.bfloat16},
        "sparse": {"controller": sparse},
        "own": {"controller": own},
        "queue": {
            "num_slots": 5,
            "batch": 2,
            "num_pages": 41,
            "controller": queue,
        },
    }
    return decoding.decoder(configuration(**changes[name]))


@pytest.mark.parametrize(("name", "model"), [("plain", MODEL), ("narrow", NARROW)])
def test_greedy_text_from_pages_equals_the_dense_model(name, model):
    rows = paged_texts(made(name), weights(), temperature=0.0)
    for slot, tokens in PROMPTS.items():
        written = rows[slot].token.tolist()
        assert len(written) == 12
        logits, _ = dense(weights(), model, tokens + written)
        assert logits[len(tokens) - 1 : -1].argmax(axis=-1).tolist() == written
    assert len(set(map(tuple, texts(rows).values()))) == 3


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
    d, c = made("sparse"), MODEL
    rows = paged_texts(d, weights(), temperature=0.0)
    plain = texts(paged_texts(made("plain"), weights(), temperature=0.0))
    assert texts(rows) != plain
    for slot, tokens in PROMPTS.items():
        written, signals = rows[slot].token.tolist(), rows[slot].signals
        opened = opened_blocks(len(tokens))
        logits, kept = dense(weights(), c, tokens + written, opened)
        at = np.arange(len(tokens) - 1, len(tokens) + len(written) - 1)
        assert logits[at].argmax(axis=-1).tolist() == written
        blocks = [sum(len({j // PAGE for j in opened(layer, i)}) for layer in range(2)) * c.num_kv_heads for i in at]
        assert signals.blocks_read.tolist() == blocks
        # What is unread counts by its mean key, which by Jensen's inequality is never too much.
        assert (signals.kept_mass >= kept[at] - 1e-5).all() and (signals.kept_mass <= 1).all()
        everything = at // PAGE + 1
        assert (signals.kept_mass[np.asarray(blocks) < 4 * everything] < 1).all()


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

        def moments(z):
            z = z - z.max(axis=-1, keepdims=True)
            p = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
            surprisal = np.where(p > 0, -np.log(np.where(p > 0, p, 1)), 0)
            mean = (p * surprisal).sum(axis=-1)
            return mean, (p * (surprisal - mean[:, None]) ** 2).sum(axis=-1), surprisal

        entropy, varentropy, surprisal = moments(logits)
        warm = moments(logits / temperature)
        tenth = np.sort(logits, axis=-1)[:, -20][:, None]
        cut = moments(np.where(logits >= tenth, logits / temperature, -np.inf))
        close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
        close(signals.entropy, entropy)
        close(signals.entropy_low, entropy)
        close(signals.entropy_high, entropy)
        close(signals.varentropy, varentropy)
        close(signals.surprisal, surprisal[np.arange(len(written)), written])
        close(signals.margin, np.diff(np.sort(logits, axis=-1)[:, -2:], axis=-1)[:, 0])
        close(signals.tempered_entropy, warm[0])
        close(signals.tempered_varentropy, warm[1])
        close(signals.truncated_entropy, cut[0])
        blocks = (at // PAGE + 1) * MODEL.num_layers * MODEL.num_kv_heads
        assert signals.blocks_read.tolist() == blocks.tolist()
        np.testing.assert_allclose(signals.cost, blocks * PAGE * width * 4 + num_bytes / 3, rtol=1e-6)
        assert signals.length.tolist() == (at + 1).tolist()
        assert signals.generated.tolist() == list(range(1, 13)) and signals.remaining.tolist() == list(
            range(11, -1, -1)
        )
        assert signals.pages_held.tolist() == (at // PAGE + 1).tolist()
        np.testing.assert_array_equal(signals.kept_mass, 1)
        np.testing.assert_array_equal(rows[slot].temperature, np.float32(temperature))
        np.testing.assert_allclose(rows[slot].total_cost, np.cumsum(signals.cost), rtol=1e-5)
        np.testing.assert_allclose(
            rows[slot].entropic_time, np.cumsum(np.maximum(-np.diff(entropy, prepend=0), 0)), atol=1e-3
        )


COMPANY = (
    {},
    {"temperature": 0.0},
    {"top_k": 5, "top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.1, "limit": 3},
)


@pytest.mark.parametrize("name", ["plain", "bfloat16", "queue"])
@pytest.mark.parametrize("asked", [{}, {"top_k": 30, "top_p": 0.9, "temperature": 0.8}], ids=["whole", "truncated"])
def test_a_sampled_text_has_the_same_bits_alone_and_in_company(name, asked):
    d = made(name)
    params = weights(jnp.bfloat16 if name == "bfloat16" else jnp.float32)
    mine = dict(seed=5, **asked)
    last = d.config.num_slots - 1
    alone = run(d, params, start(d, params, d.empty(), 0, PROMPTS[0], **mine))[1][0]
    assert len(set(alone.token.tolist())) > 3
    for slot, (number, other) in zip((0, last, 1, last), enumerate(COMPANY), strict=True):
        state = d.empty()
        for neighbour in range(d.config.num_slots):
            if neighbour == slot:
                state = start(d, params, state, slot, PROMPTS[0], arrival=7, **mine)
            elif neighbour or number % 2:
                length = 3 + 8 * ((neighbour + number) % 3)
                state = start(d, params, state, neighbour, prompt(10 + neighbour, length), arrival=neighbour, **other)
        again = []
        for _ in range(2):  # a queue serves two of five at a time
            state, rows = run(d, params, state)
            again.append(rows[slot])
        again = jax.tree.map(lambda *x: np.concatenate(x), *again)
        assert again.token.tolist() == alone.token.tolist()
        assert again.signals.arrival.tolist() == [7] * 12
        expected = jax.tree.map(np.copy, alone)
        expected.signals.arrival[:] = 7
        assert same_bits(again, expected)


def test_a_key_and_an_index_decide_the_text():
    d = made("plain")
    args = d, weights(), 0, PROMPTS[0]
    first = text_of(*args, seed=1)
    assert text_of(*args, seed=1) == first
    assert text_of(*args, seed=2) != first and text_of(*args, seed=1, index=1) != first


def row_of(state, slot: int):
    """Everything of one slot but the count of its waiting and the score that waiting changes."""
    fields = ("token", "length", "generated", "limit", "active", "arrival", "sampling", "signals")
    rows = {name: getattr(state, name) for name in fields}
    rows |= {name: x for name, x in vars(state.control).items() if name not in ("wait", "priority")}
    return jax.tree.map(
        lambda x: np.array(x[slot]), rows | {"pages": state.table.pages, "blocks": state.table.num_blocks}
    )


def test_a_refused_step_changes_nothing_and_the_text_goes_on_when_a_page_is_free():
    """15 + 9 pages are all there are. The last slot's sequence stands at the end of a page and needs another."""
    d, params = made("plain"), weights()
    tokens, asked = prompt(3, 5), dict(seed=3, limit=6)
    expected = text_of(d, params, 2, tokens, **asked)
    state = start(d, params, d.empty(), 2, tokens, **asked)
    state = fill(d, params, state, 0, prompt(4, 60))
    state = fill(d, params, state, 1, prompt(5, 33))
    assert int(state.table.num_free) == 0
    before, cache = row_of(state, 2), jax.tree.map(np.array, state.cache)
    for wait in (1, 2):
        state, output = d.step(params, state)
        assert output.refused.tolist() == [False, False, True] and not output.produced.any()
        assert same_bits(row_of(state, 2), before) and same_bits(state.cache, cache)
        assert int(state.control.wait[2]) == wait
    state = d.release(state, 1)
    state, rows = run(d, params, state)
    assert texts(rows)[2] == expected
    assert int(state.control.wait[2]) == 0


def test_a_refused_chunk_changes_nothing():
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = fill(d, params, state, 1, prompt(5, 33))
    before = jax.tree.map(np.asarray, state)
    state, granted = d.prefill(params, state, *pack(d.config, [(2, range(CHUNK))]))
    assert not granted.any() and same_bits(state, before)


def test_a_refused_fork_changes_nothing_and_full_pages_need_none():
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = start(d, params, state, 1, prompt(5, 36))  # 35 tokens: the last of nine pages is partial
    assert int(state.table.num_free) == 0
    before = jax.tree.map(np.asarray, state)
    state, granted = d.fork(state, 1, 2)
    assert not granted and same_bits(state, before)
    state = d.release(state, 1)
    state = start(d, params, state, 1, prompt(5, 33))  # 32 tokens: eight full pages
    state, granted = d.fork(state, 1, 2)
    assert granted and state.table.pages[2].tolist() == state.table.pages[1].tolist()


def test_every_page_comes_back():
    d, params = made("plain"), weights()
    state = d.empty()
    for slot, tokens in PROMPTS.items():
        state = start(d, params, state, slot, tokens)
    state = d.release(state, 1)
    state, _ = run(d, params, state, 7)
    state, granted = d.fork(state, 0, 1)
    assert granted
    state, _ = run(d, params, state, 3)
    for slot in (0, 2, 1):
        state = d.release(state, slot)
    assert int(state.table.num_free) == POOL - 1 and not state.table.references.any()
    assert sorted(state.table.free[: POOL - 1].tolist()) == list(range(1, POOL))
    assert not state.active.any() and not state.length.any() and not state.table.pages.any()


def test_text_on_pages_used_before_is_the_text_on_fresh_ones():
    d, params = made("plain"), weights()
    fresh = text_of(d, params, 0, PROMPTS[0], seed=4)
    state = start(d, params, d.empty(), 0, prompt(6, 50), seed=1)
    state, _ = run(d, params, state)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.ndim > 2 and x.dtype == jnp.float32 else x, state)
    state = d.release(state, 0)
    _, rows = run(d, params, start(d, params, state, 0, PROMPTS[0], seed=4))
    assert texts(rows)[0] == fresh


@pytest.mark.parametrize("moved", [2, 4], ids=["partial page", "full pages"])
def test_a_fork_shares_pages_has_its_own_future_and_leaves_its_source_alone(moved):
    """Of a prompt of 9 the cache holds 8 tokens; with 2 more the third page is half full, with 4 it is full."""
    d, params = made("plain"), weights()
    asked = dict(seed=8, limit=16)
    tokens = prompt(7, 9)
    undisturbed = text_of(d, params, 0, tokens, **asked)
    state = start(d, params, d.empty(), 0, tokens, **asked)
    state, before = run(d, params, state, moved)
    source = row_of(state, 0)
    length = int(state.length[0])
    state, granted = d.fork(state, 0, 2)
    assert granted and same_bits(row_of(state, 0), source)
    full = length // PAGE
    pages = np.asarray(state.table.pages)
    assert (pages[2, :full] == pages[0, :full]).all()
    assert np.asarray(state.table.references)[pages[0, :full]].tolist() == [2] * full
    if length % PAGE:
        assert pages[2, full] not in (0, pages[0, full])
        for layer in state.cache.layers:
            used = slice(0, length % PAGE)
            np.testing.assert_array_equal(layer.pages[:, pages[2, full], used], layer.pages[:, pages[0, full], used])
            for leaf in jax.tree.leaves(layer.summary):
                np.testing.assert_array_equal(leaf[:, pages[2, full]], leaf[:, pages[0, full]])
    assert same_bits(jax.tree.map(lambda x: x[2], state.control), jax.tree.map(lambda x: x[0], state.control))
    state, rows = run(d, params, state)
    done = texts(before)[0]
    assert done + texts(rows)[0] == undisturbed
    assert len(texts(rows)[2]) == 16 - moved and texts(rows)[2] != texts(rows)[0]


def test_a_greedy_fork_writes_the_same_text_and_outlives_its_source():
    d, params = made("plain"), weights()
    expected = text_of(d, params, 0, PROMPTS[2], temperature=0.0)
    state = start(d, params, d.empty(), 0, PROMPTS[2], temperature=0.0)
    state, before = run(d, params, state, 3)
    state, _ = d.fork(state, 0, 1)
    state = d.release(state, 0)
    state = start(d, params, state, 0, prompt(9, 17))  # on the pages that came free
    state, rows = run(d, params, state)
    assert texts(before)[0] + texts(rows)[1] == expected


def test_a_snapshot_survives_a_donating_step_and_continues_the_same_text():
    d, params = made("plain"), weights()
    state = start(d, params, d.empty(), 1, PROMPTS[0], seed=6)
    state, before = run(d, params, state, 4)
    kept = decoding.snapshot(state)
    held = state.token
    state, rows = run(d, params, state)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(held)
    first = texts(rows)[1]
    assert len(texts(before)[1] + first) == 12
    _, rows = run(d, params, kept)
    assert texts(rows)[1] == first


def test_logits_that_are_no_numbers_end_their_row_alone():
    """A token whose embedding is NaN spoils its own sequence: not the others, nor the next on its pages."""
    d, params = made("plain"), weights()
    expected = {slot: text_of(d, params, slot, PROMPTS[slot], seed=slot) for slot in PROMPTS}
    written = set(itertools.chain(*expected.values(), *PROMPTS.values()))
    poison = next(token for token in range(VOCABULARY) if token not in written)
    broken = replace(params, embedding=params.embedding.at[poison].set(jnp.nan))
    state = start(d, broken, d.empty(), 1, [*prompt(1, 6)[:5], poison], seed=9)
    for slot in (0, 2):
        state = start(d, broken, state, slot, PROMPTS[slot], seed=slot)
    before = row_of(state, 1)
    state, output = d.step(broken, state)
    assert (output.fault > 0).tolist() == [False, True, False] and output.produced.tolist() == [True, False, True]
    assert not state.active[1] and not output.finished.any()
    assert before.pop("active") and before.pop("blocks") == 2
    assert same_bits({name: x for name, x in row_of(state, 1).items() if name in before}, before)
    state, rows = run(d, broken, state)
    for slot in (0, 2):
        assert [int(output.token[slot]), *texts(rows)[slot]] == expected[slot]
    state = d.release(state, 1)
    _, rows = run(d, broken, start(d, broken, state, 1, PROMPTS[1], seed=1))
    assert texts(rows)[1] == expected[1]


def test_a_law_and_a_temperature_rule_of_ones_own_set_the_temperature():
    """The law sets the next step from this entropy, the rule adds to it from the entropy of the very step."""
    d = made("own")
    rows = run(d, weights(), start(d, weights(), d.empty(), 0, PROMPTS[0], temperature=1.5))[1][0]
    h = rows.signals.entropy
    law = np.concatenate([[1.5], 0.5 + 0.1 * h[:-1]])
    np.testing.assert_allclose(rows.temperature, law + 0.01 * h, rtol=1e-5)
    assert rows.token.tolist() != text_of(made("plain"), weights(), 0, PROMPTS[0], temperature=1.5)


def test_temperature_zero_is_greedy_under_every_law_and_rule():
    own = paged_texts(made("own"), weights(), temperature=0.0)
    assert texts(own) == texts(paged_texts(made("plain"), weights(), temperature=0.0))
    for row in own.values():
        np.testing.assert_array_equal(row.temperature, 0)
        np.testing.assert_array_equal(row.signals.tempered_entropy, 0)


def turns(arrivals: list[int], limit: int) -> np.ndarray:
    """Which slots of the queue produced a token at each step."""
    d, params = made("queue"), weights()
    state = d.empty()
    for slot, arrival in enumerate(arrivals):
        state = start(d, params, state, slot, prompt(20 + slot, 3), limit=limit, arrival=arrival)
    state, output, ran = d.decode(params, state, 32)
    return np.asarray(output.produced[: int(ran)])


def test_first_come_first_served_where_fewer_are_served_than_wait():
    """Arrivals so far apart that waiting does not count: two at a time, and the next when one is done."""
    order = [300, 0, 400, 100, 200]  # slot 1 came first, then 3, 4, 0, 2
    produced = turns(order, 5)
    expected = np.zeros((15, 5), bool)
    for steps, slots in ((range(0, 5), (1, 3)), (range(5, 10), (4, 0)), (range(10, 15), (2,))):
        for step, slot in itertools.product(steps, slots):
            expected[step, slot] = True
    assert produced.tolist() == expected.tolist()


def test_with_aging_everybody_is_served():
    """Arrivals 0 to 4, half a point a step: 8 steps lift the last above one just served, 2 more serve those between."""
    produced = turns([0, 1, 2, 3, 4], 12)
    assert not produced[:2, 2:].any()
    assert produced.sum(axis=0).tolist() == [12] * 5
    for slot in range(5):
        served = np.flatnonzero(produced[:, slot])
        assert np.diff(served, prepend=-1).max() <= 8 + 2 + 1


def test_many_steps_on_the_device_are_as_many_single_steps():
    """Two programs may round differently; what they count and draw is the same."""

    def close(a, b):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            exact = not jnp.issubdtype(x.dtype, jnp.floating)
            np.testing.assert_allclose(x, y, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)

    d, params = made("plain"), weights()

    def begin():
        state = d.empty()
        for slot, limit in ((0, 3), (2, 6)):
            state = start(d, params, state, slot, PROMPTS[slot], seed=slot, limit=limit)
        return state

    together, stacked, ran = d.decode(params, begin(), 5)
    assert int(ran) == 5
    state = begin()
    for i in range(5):
        state, output = d.step(params, state)
        close(output, jax.tree.map(lambda x, i=i: x[i], stacked))
    close(state, together)
    assert not any(x[5:].any() for x in jax.tree.leaves(stacked))


def test_decoding_stops_when_nobody_is_active():
    d, params = made("plain"), weights()
    state = start(d, params, d.empty(), 1, PROMPTS[0], limit=5)
    state, output, ran = d.decode(params, state, 32)
    assert int(ran) == 5 and output.finished[:, 1].tolist()[:5] == [False] * 4 + [True]
    _, _, ran = d.decode(params, state, 32)
    assert int(ran) == 0
    state = start(d, params, d.empty(), 1, PROMPTS[0], limit=0)
    assert not state.active.any()


def test_a_stop_id_ends_the_text_with_itself():
    d, params = made("plain"), weights()
    whole = text_of(d, params, 0, PROMPTS[0], seed=2)
    stop = whole[4]
    written = text_of(d, params, 0, PROMPTS[0], seed=2, stop=(95 if stop != 95 else 94, stop))
    assert written == whole[: whole.index(stop) + 1]


def test_whatever_is_asked_each_function_compiles_once():
    d, params = made("plain"), weights()
    settings = (
        {},
        {"temperature": 0.0},
        {"top_k": 3, "stop": (4,)},
        {"top_p": 0.5, "min_p": 0.1, "limit": 2, "index": 3},
    )
    state = d.empty()
    for number, asked in enumerate(settings):
        slot = number % 3
        state = d.release(state, slot)
        state = start(d, params, state, slot, prompt(30 + number, 1 + 9 * number), seed=number, **asked)
        state, _ = d.step(params, state)
        state, _ = run(d, params, state, number)
    state, _ = d.fork(d.release(state, 2), 0, 2)
    functions = ("empty", "prefill", "insert", "step", "decode", "release", "fork")
    assert {name: getattr(d, name)._cache_size() for name in functions} == dict.fromkeys(functions, 1)


def test_the_cache_is_updated_in_place_and_what_a_step_needs_beside_it_does_not_grow_with_the_pool():
    model = dataclasses.replace(MODEL, num_layers=1, windows=(None,))

    def analysed(num_pages: int):
        d = decoding.decoder(configuration(model=model, num_pages=num_pages))
        params = jax.eval_shape(functools.partial(initialise, model), jax.random.key(0))
        state = jax.eval_shape(d.empty)
        memory = d.step.lower(params, state).compile().memory_analysis()
        size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
        assert memory.alias_size_in_bytes >= size
        return memory.temp_size_in_bytes, size

    (small, _), (large, pool) = analysed(25), analysed(1025)
    assert large - small < 0.01 * pool


def test_what_cannot_work_is_refused_while_configuring():
    with pytest.raises(ValueError, match="batch: got 1, wanted 2 to num_slots = 3"):
        configuration(batch=1)
    with pytest.raises(ValueError, match="batch: got 4"):
        configuration(batch=4)
    with pytest.raises(ValueError, match="prefill_batch: got 6, wanted a multiple of chunk = 8"):
        configuration(prefill_batch=6)
    with pytest.raises(ValueError, match="chunk: got 6, wanted a multiple of page_size = 4"):
        configuration(chunk=6)
    with pytest.raises(ValueError, match="got 1 selectors, wanted one per layer: 2"):
        configuration(controller=Controller(selector=(even_blocks,)))
