"""Drafts: what a lookup finds, how drafted tokens are laid out, and that no drafter changes a text."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import CHUNK, LENGTH, OTHER, PROMPTS, VOCABULARY, configuration, produced, same_bits, texts, weights
from small_model import MODEL as OF_TWO_LAYERS

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.draft import FixedLength, StopEntropy
from et_jax.control.draft_speed import AcceptanceLength
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.select import Certified, PerHead, coded_bounds
from et_jax.control.temperature import Thermostat
from et_jax.control.tolerance import Constant
from et_jax.control.view import needing
from et_jax.decode import decoder as decoding
from et_jax.decode.drafting.drafts import Drafting, Pruned, lookup
from et_jax.decode.fresh import law_numbers
from et_jax.models.weights import Dense
from et_jax.sums import total
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

# A program of drafts has the model's layers several times; with several of them the laws of tests/laws hold.
MODEL = dataclasses.replace(OF_TWO_LAYERS, num_layers=1, windows=(None,))


def found_in(text: list[int], most: int) -> list[int]:
    """What follows the latest place with the longest match of two to four tokens, round and round."""
    newest = len(text) - 1
    for length in (4, 3, 2):
        for place in range(newest - 1, length - 2, -1):
            if text[place - length + 1 : place + 1] == text[newest - length + 1 : newest + 1]:
                after = text[place + 1 :]
                return [after[i % len(after)] for i in range(most)]
    return [-1] * most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=2, max_size=2))
def test_a_lookup_finds_the_latest_of_the_longest_matches(texts):
    padded = np.full((2, 14), 2, np.int32)  # what stands behind the end is never found
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    newest = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    got = lookup(jnp.asarray(padded), newest, 5)
    assert got.tolist() == [found_in(text, 5) for text in texts]


def garbage(text, newest, most):
    """Tokens that have nothing to do with the text."""
    return (newest[:, None] * 7 + jnp.arange(most, dtype=jnp.int32) * 3) % VOCABULARY


@needing("surprisals")
def more_surprising_than_most(view):
    """A selector of one's own, to which every block matters for every other."""
    there = (view.num_tokens > 0).astype(jnp.float32)
    return view.mean_surprisal * total(there) > total(there * view.mean_surprisal)


CONTROLS = {
    "off": Controller(),
    "certified": Controller(
        law=chain(FallClock(), Thermostat(2.0), Constant(0.2)),
        selector=PerHead(Certified(coded_bounds), AttentionEntropy()),
        residual=True,
    ),
    "surprisals": Controller(law=FallClock(), selector=more_surprising_than_most),
}
ASKED = {
    0: {"temperature": 0.0},
    1: {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    2: {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 5},
}
LIMIT = 20


def given_to(d):
    """The weights that a decoder runs on: a small model of the model's own shape has its weights too."""
    return tuple(weights(model=model) for model in (MODEL, *d.config.others))


def begun(d, params, **asked):
    return small_model.begun(d, params, lambda slot: {"limit": LIMIT} | ASKED[slot] | asked)


def figures(rows) -> list[tuple]:
    """What every slot was brought, token by token, but what is told of drafts."""
    told = "token", "finished", "temperature", "entropic_time", "total_cost", "signals"
    return [tuple(getattr(row, name) for name in told) for row in rows.values()]


@functools.cache
def made(control: str, drafting: Drafting | None, small=None):
    models = {"model": MODEL, "others": () if small is None else (small,)}
    sizes = {"penalties": True, "num_pages": 49}
    return decoding.decoder(configuration(controller=CONTROLS[control], draft=drafting, **models, **sizes))


def decoded(d, **asked):
    params = given_to(d)
    state, output, ran = d.decode(params, begun(d, params, **asked), 32)
    return state, produced(output, int(ran)), output, int(ran)


@functools.cache
def plain(control: str):
    state, rows, _, _ = decoded(made(control, None))
    return state, rows


fixed = functools.partial(Drafting, most=4, length=FixedLength())
DRAFTERS = {
    "the same model beside it": (fixed(drafter=None), MODEL),
    "itself": (fixed(drafter=Pruned(share=0.3)), None),
    "another model by turns": (Drafting(most=4, length=AcceptanceLength(retry=4), drafter=None), OTHER),
}


@pytest.mark.parametrize(
    ("control", "drafter"),
    [("off", "the same model beside it"), ("certified", "another model by turns"), ("surprisals", "itself")],
)
def test_no_draft_changes_a_token_or_what_the_laws_were_told(control, drafter):
    drafting, small = DRAFTERS[drafter]
    before, expected = plain(control)
    after, rows, output, ran = decoded(made(control, drafting, small=small))
    assert int(output.drafted.sum()) > 0
    if small == MODEL:  # it draws with the same noise; but for penalties, which count no drafted tokens, it is right
        drafted, accepted = (np.asarray(x)[:ran, 0, :2] for x in (output.drafted, output.accepted))
        assert (drafted == accepted).all() and (drafted[:3] == 4).all()
    if control == "surprisals":  # they choose once their block is full: no draft goes beyond the one that it begins in
        drafted, length = np.asarray(output.drafted)[:ran, 0], np.asarray(output.signals.length)[:ran, 0]
        newest = length - 1  # the first token of a step stands there
        assert (drafted <= 3 - newest % 4)[drafted > 0].all() and drafted.max() == 3 and int(output.accepted.sum()) > 0
    assert {len(row.token) for row in rows.values()} == {LIMIT}
    assert same_bits(figures(rows), figures(expected))
    assert same_bits(after.control, before.control) and same_bits(after.table.num_blocks, before.table.num_blocks)
    assert int(after.table.num_free) == int(before.table.num_free)


def test_where_a_lookup_has_a_guess_it_is_taken_and_else_the_model_drafts():
    """One sequence is always guessed at, wrongly; another never; a third for its first two tokens of a step.

    What is asked before is charged with its own guesses alone, and the model passes for those alone that it writes.
    """

    def some(text, newest, most):
        return jnp.where(jnp.arange(most) < jnp.asarray([most, 0, 2])[:, None], garbage(text, newest, most), -1)

    free = AcceptanceLength(0.0, retry=1)  # drafts that cost nothing are always made
    before = Drafting(most=4, length=free, drafter=some)
    whole = fixed(drafter=Pruned(mass=1.0, share=1.0), before=before)
    _, expected = plain("off")
    after, rows, output, ran = decoded(made("off", whole))
    assert texts(rows) == texts(expected)
    drafted, accepted = (np.asarray(x)[:ran, 0] for x in (output.drafted, output.accepted))
    assert drafted[0].tolist() == [4, 0, 2]  # nothing of its own yet
    assert (drafted[1:3, 1] == 4).all() and (drafted[:, 1] == accepted[:, 1]).all()
    own, before = after.draft, after.draft.before
    assert before is not None
    assert before.acceptance[1] == 0.5 and own.acceptance[1] > 0.5  # of the second only the model spoke
    assert own.acceptance[0] == 0.5 and before.acceptance[0] < 0.2  # and never of the first
    passes = np.asarray(output.work[0].passes)[:ran, 0].max(axis=-1)
    assert (passes[1:3] == 5).all() and passes[0] == 1
    # a step reads its newest token, and each of its own drafts twice: to go on from the one before it, and to verify it
    tokens = np.asarray(output.work[0].tokens)[:ran, :, 1].sum(axis=1)
    assert (tokens == np.where(drafted[:, 1] > 0, 1 + 2 * drafted[:, 1], tokens > 0)).all()


def test_the_small_model_reads_a_text_once():
    """Every token but the newest is given to it, by drafts, by catching up, or one with the next draft."""
    for control, drafter in (("off", "the same model beside it"), ("certified", "another model by turns")):
        drafting, small = DRAFTERS[drafter]
        state, _, output, ran = decoded(made(control, drafting, small=small))
        small_cached = state.plants[1].num_cached
        wasted = np.asarray(output.drafted - output.accepted)[:ran, 0]
        told, passes = (np.asarray(x)[:ran, 0] for x in (output.work[1].tokens, output.work[1].passes))
        assert (passes[told.sum(axis=-1) == 0] == 0).all() and (passes <= 5 + LENGTH // CHUNK).all()
        for slot, tokens in PROMPTS.items():
            held, whole = int(small_cached[slot]), len(tokens) - 1 + LIMIT
            # the last of a draft that fails is not read, and what is read of one that does is read again
            last = np.count_nonzero(wasted[:, slot])
            assert held <= whole
            assert told[:, slot].sum() == held - (len(tokens) - 1) + wasted[:, slot].sum() - last


def test_a_draft_stops_where_the_small_model_is_uncertain():
    d = made("off", Drafting(most=4, length=StopEntropy(), drafter=None), small=OTHER)
    params, most = given_to(d), []
    for bound in (-1.0, 1e9):
        state = replace(begun(d, params), draft_laws=law_numbers((StopEntropy(bound),)))
        most.append(int(d.decode(params, state, 32)[1].drafted.max()))
    assert most == [1, 4]


def test_a_drafted_stop_id_ends_the_text_where_it_would_end():
    _, expected = plain("off")
    written = texts(expected)[2]
    stop = written[9]
    ended = written[: written.index(stop) + 1]
    for drafting in (None, fixed()):
        state, rows, _, _ = decoded(made("off", drafting), stop_ids=(stop,))
        assert texts(rows)[2] == ended
        assert not state.active[2] and int(state.length[2]) == len(PROMPTS[2]) - 1 + len(ended)


def test_a_pool_without_room_for_drafts_refuses_none_of_the_text():
    """The pages hold the three texts and no more: drafts take what is left over, for as long as it is."""
    needed = sum(-(-(len(tokens) - 1 + LIMIT) // 4) for tokens in PROMPTS.values())
    d = made("off", fixed())
    params = given_to(d)
    state = begun(d, params)
    free = jnp.int32(needed - int(state.table.num_blocks.sum()))
    state, output, ran = d.decode(params, replace(state, table=replace(state.table, num_free=free)), 32)
    rows = produced(output, int(ran))
    assert not output.refused[: int(ran)].any()
    assert texts(rows) == texts(plain("off")[1])
    assert int(state.table.num_free) == 0


def test_a_drafted_token_that_the_model_fails_on_changes_no_text():
    """Its row shares pages with the rows before it, whose weight for it is 0; 0 times NaN is NaN."""
    _, expected = plain("surprisals")
    written = {token for slot, tokens in PROMPTS.items() for token in (*tokens, *texts(expected)[slot])}
    unused = jnp.asarray(sorted(set(range(VOCABULARY)) - written))
    whole = weights(model=MODEL)
    assert whole.head is not None
    broken = replace(whole, embedding=Dense(array=whole.embedding.array.at[unused].set(jnp.nan)))
    d = made("surprisals", fixed(drafter=garbage))
    _, output, ran = d.decode((broken,), begun(d, (broken,)), 32)
    assert int(output.drafted.sum()) > 0 and not output.fault.any()
    rows = produced(output, int(ran))
    assert same_bits(figures(rows), figures(expected))
