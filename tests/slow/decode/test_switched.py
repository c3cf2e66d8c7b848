"""Two models that take turns: texts of an independent program, one model alone at either end of tau, none left out."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, OTHER, PROMPTS, configuration, dense, fill, given, same_bits, weights

from et_jax.control.contribution import token_nll
from et_jax.control.controller import Controller
from et_jax.control.select import ActiveSet
from et_jax.control.switch import MODEL as LARGE
from et_jax.control.switch import AsPrinted, Hysteresis
from et_jax.decode import decoder as decoding
from et_jax.decode.request import request

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIMIT = 20
SWITCHES = {
    "printed": AsPrinted(4.17, window=3, least=2),
    "guarded": Hysteresis(4.2, low=0.98, window=3, least=2),
}


def pair() -> tuple:
    return weights(), weights(model=OTHER)


@functools.cache
def made(switch, **changes):
    """The decoder of a switch's structure; its numbers come with the requests."""
    return decoding.decoder(
        configuration(controller=Controller(switch=switch), others=(OTHER,), num_pages=49, **changes)
    )


@functools.cache
def of_one(model):
    return decoding.decoder(configuration(model=model, num_pages=49))


def begun(d, params, slots=tuple(PROMPTS), switch=None, **asked):
    control = None if switch is None else dataclasses.replace(d.config.controller, switch=switch)
    state = d.empty()
    for slot in slots:
        state = fill(d, params, state, slot, PROMPTS[slot])
        one = request(
            d.config, PROMPTS[slot], limit=LIMIT, temperature=0.7 * (slot == 1), seed=slot, control=control, **asked
        )
        state = d.insert(state, slot, one)
    return state


def spoken(d, params, state, steps=32):
    """Tokens, entropies and, of two models, who spoke, of every slot."""
    outputs = []
    while jnp.any(state.active):
        state, output, ran = d.decode(given(params), state, steps)
        outputs.append(jax.tree.map(lambda x, ran=ran: np.asarray(x)[: int(ran), 0], output))
    output = jax.tree.map(lambda *x: np.concatenate(x), *outputs)
    rows = {}
    for slot in PROMPTS:
        at = np.flatnonzero(output.produced[:, slot])
        small = None if output.by_small is None else output.by_small[at, slot].tolist()
        rows[slot] = (output.token[at, slot].tolist(), output.signals.entropy[at, slot], small)
    return state, rows, output


def both(switch, **asked):
    d = made(SWITCHES["printed"] if isinstance(switch, AsPrinted) else SWITCHES["guarded"])
    return spoken(d, pair(), begun(d, pair(), switch=switch, **asked))


def alone(model, params):
    d = of_one(model)
    return spoken(d, params, begun(d, params))[1]


def by_hand(switch, tokens: list[int]) -> tuple[list[int], list[bool]]:
    """The greedy text and who says what, by dense forward passes over the whole text and the paper's own loop."""
    text, window, since, small = list(tokens), [], 0, True
    if isinstance(switch, Hysteresis):
        since = switch.least
    said, by_small = [], []
    while len(said) < LIMIT:
        model, params = (OTHER, pair()[1]) if small else (MODEL, pair()[0])
        logits = dense(params, model, text)[0][-1]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)))
        seen = [*window, entropy][-switch.window :]
        if isinstance(switch, Hysteresis) and small and since >= switch.least and np.mean(seen) > switch.tau:
            small, window, since = False, [], 0
            continue
        said.append(int(np.argmax(logits)))
        text.append(said[-1])
        by_small.append(small)
        window, since = seen, since + 1
        if isinstance(switch, AsPrinted):
            wanted = np.mean(window) <= switch.tau
            if since >= switch.least and wanted != small:
                small, since = wanted, 0
        elif not small and since >= switch.least and np.mean(window) <= switch.low * switch.tau:
            small, window, since = True, [], 0
    return said, by_small


@pytest.mark.parametrize("name", SWITCHES)
def test_two_models_write_what_an_independent_program_does(name):
    _, rows, output = both(SWITCHES[name])
    for slot in (0, 2):
        said, by_small = by_hand(SWITCHES[name], PROMPTS[slot])
        assert rows[slot][0] == said and rows[slot][2] == by_small
        assert 0 < sum(by_small) < LIMIT  # both speak
    # tokens read: each model reads every text up to the last token it speaks after, once
    read = np.asarray([work.tokens.sum() for work in output.work])
    assert (read <= len(PROMPTS) * LIMIT + sum(map(len, PROMPTS.values()))).all() and (read > 0).all()


@pytest.mark.parametrize("switch", [AsPrinted(math.inf, 3, 2), Hysteresis(math.inf, 0.95, 3, 2)], ids=list(SWITCHES))
def test_without_a_bound_the_small_model_speaks_alone(switch):
    _, rows, output = both(switch)
    expected = alone(OTHER, pair()[1])
    for slot in PROMPTS:
        assert rows[slot][0] == expected[slot][0] and same_bits(rows[slot][1], expected[slot][1])
        assert all(rows[slot][2])
    assert not any(leaf.any() for leaf in jax.tree.leaves(output.work[LARGE]))


def test_with_a_bound_below_nothing_the_model_speaks_alone_from_the_first_token():
    _, rows, _ = both(Hysteresis(-1.0, 0.95, 3, 2))
    expected = alone(MODEL, weights())
    for slot in PROMPTS:
        assert rows[slot][0] == expected[slot][0] and same_bits(rows[slot][1], expected[slot][1])
        assert not any(rows[slot][2])


def test_as_printed_the_small_model_has_the_first_words_whatever_tau():
    _, rows, _ = both(AsPrinted(-1.0, 3, 4))
    for slot in PROMPTS:
        assert rows[slot][2] == [True] * 4 + [False] * (LIMIT - 4)


@pytest.mark.parametrize("name", SWITCHES)
def test_texts_are_the_same_alone_in_company_and_with_prompts_read_late(name):
    switch = SWITCHES[name]
    _, together, _ = both(switch)
    for slot in PROMPTS:
        d = made(switch)
        _, rows, _ = spoken(d, pair(), begun(d, pair(), slots=(slot,)), steps=7)
        assert rows[slot][0] == together[slot][0] and same_bits(rows[slot][1], together[slot][1])
    late = made(switch, lazy=True)
    state = begun(late, pair())
    model, small = (plant.num_cached for plant in state.plants)
    assert not model.any() and small.tolist() == [len(PROMPTS[slot]) - 1 for slot in PROMPTS]
    _, rows, _ = spoken(late, pair(), state)
    for slot in PROMPTS:
        assert rows[slot][0] == together[slot][0] and rows[slot][2] == together[slot][2]
        assert same_bits(rows[slot][1], together[slot][1])


def test_a_sequence_swapped_out_and_in_goes_on_as_it_was():
    switch = SWITCHES["guarded"]
    d = made(switch)
    _, expected, _ = both(switch)
    state, first, _ = d.decode(pair(), begun(d, pair()), 9)
    moved = []
    for slot in PROMPTS:
        row = d.read_row(state, slot)
        pages = [d.read_pages(state, slot, at) for at in range(0, d.config.blocks_per_slot, d.config.pages_per_swap)]
        moved.append((row, pages))
        state = d.release(state, slot)
    for slot, (row, pages) in zip((2, 0, 1), moved, strict=True):
        state, granted = d.write_row(state, slot, row)
        assert granted
        for number, taken in enumerate(pages):
            state = d.write_pages(state, slot, number * d.config.pages_per_swap, taken)
    _, rows, _ = spoken(d, pair(), state)
    for old, new in ((0, 2), (1, 0), (2, 1)):
        begun_with = np.asarray(first.token)[:9, 0][np.asarray(first.produced)[:9, 0, old], old].tolist()
        assert begun_with + rows[new][0] == expected[old][0]


def test_no_sequence_waits_for_ever_and_pages_balance():
    """Two rows a step for three sequences, of which some are always at the other model."""
    d = made(SWITCHES["guarded"], batch=2)
    state, rows, output = spoken(d, pair(), begun(d, pair()))
    assert all(len(rows[slot][0]) == LIMIT for slot in PROMPTS) and not output.refused.any()
    for slot in PROMPTS:
        state = d.release(state, slot)
    assert int(state.table.num_free) == d.config.num_pages - 1
    assert not any(plant.num_cached.any() for plant in state.plants)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"controller": Controller(switch=AsPrinted(1.0))}, "This control switches between two models; name the other"),
        (
            {"controller": Controller(switch=AsPrinted(1.0), selector=ActiveSet(token_nll)), "others": (MODEL,)},
            "goes by surprisals, which a model that lags does not know",
        ),
    ],
)
def test_what_two_models_cannot_do_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        configuration(**changes)


def test_whoever_catches_up_says_which_of_the_others_words_were_its_own_too():
    switch = SWITCHES["printed"]
    d = made(switch, audit=True)
    _, rows, output = spoken(d, pair(), begun(d, pair()))
    _, expected, _ = both(switch)
    for slot in (0, 2):
        said, _, by_small = rows[slot]
        assert said == expected[slot][0] and by_small == expected[slot][2]
        # all words of a run were caught up with, but those of the last one
        last = max(i for i in range(1, LIMIT) if by_small[i] != by_small[i - 1])
        agreed = 0
        for i in range(last):
            model, params = (MODEL, pair()[0]) if by_small[i] else (OTHER, pair()[1])
            agreed += int(np.argmax(dense(params, model, PROMPTS[slot] + said[:i])[0][-1])) == said[i]
        told = [each[:, slot].sum() for each in (output.audit.audited, output.audit.agreed)]
        assert told == [last, agreed]
