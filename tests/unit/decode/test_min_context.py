"""A sequence shorter than the least context reads all, and nothing is scored for it, alone and in company."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PAGE, configuration, fill, prompt, request, run, same_bits, weights

from et_jax.control.draft import FixedLength
from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder, snapshot
from et_jax.decode.draft import Drafting, Pruned
from et_jax.models.calibration import Calibration
from et_jax.types import Table, replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LEAST, SHORT, LONG, STEPS = 24, 9, 30, 8
TOLERANCES = {"certified": 0.5, "adaptive": 0.5, "paper": 0.5}
SLOW = {"paper", "adaptive"}  # that differ from the others in what they choose by
NAMES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TOLERANCES]
)
HEADS = np.ones((MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size), np.float32)


def controller(name: str, min_context: int = LEAST):
    return preset(name, tolerance=TOLERANCES[name], min_blocks=1, window=4, min_context=min_context)


@functools.cache
def made(name: str, drafts: Drafting | None = None):
    how = {"controller": controller(name), "calibration": Calibration(sensitivity=Table(HEADS)), "draft": drafts}
    return decoder(configuration(**how))


def rows_of(name: str, lengths: dict[int, int], min_context: int = LEAST):
    """The rows of the output of every slot, whose prompts have these lengths."""
    d = made(name)
    return run(d, weights(), begun(d, name, lengths, min_context))[1]


def begun(d, name: str, lengths: dict[int, int], min_context: int = LEAST):
    """A state with a prompt of each length."""
    state = d.empty()
    for slot, length in lengths.items():
        tokens = prompt(slot, length)
        asked = request(tokens[-1], control=controller(name, min_context), seed=slot, limit=STEPS)
        asked = replace(asked, num_drafted=jnp.int32(4))  # where a decoder drafts at all
        state = d.insert(fill(d, weights(), state, slot, tokens), slot, asked)
    return state


def text_and_reads(row):
    """What a sequence came to; what a step costs depends on the company."""
    names = ("entropy", "surprisal", "kept_mass", "attention_entropy", "blocks_read", "summaries_read")
    return row.token, [getattr(row.signals, name) for name in names]


@NAMES
def test_a_short_sequence_reads_all_and_nothing_is_scored(name):
    rows = rows_of(name, {0: SHORT})[0]
    held = -(-rows.signals.length // PAGE) * MODEL.num_layers * MODEL.num_kv_heads
    np.testing.assert_array_equal(rows.signals.blocks_read, held)
    np.testing.assert_array_equal(rows.signals.kept_mass, 1.0)
    assert not rows.signals.summaries_read.any() and np.isnan(rows.signals.attention_entropy).all()
    assert len(rows.token) == STEPS


ITSELF = Drafting(most=4, length=FixedLength(), drafter=Pruned(share=0.3))


@pytest.mark.parametrize("drafts", [None, pytest.param(ITSELF, marks=pytest.mark.slow)])
def test_short_sequences_come_to_the_same_where_no_step_can_choose_blocks(drafts):
    d = made("certified", drafts)
    whole, never = d.config.whole, d.config.whole._replace(chooses=False)
    state = begun(d, "certified", {0: SHORT, 2: SHORT + 3})
    both = [d.variants[one]((weights(),), snapshot(state), STEPS) for one in (whole, never)]
    assert int(both[0][2]) > 1 and both[0][1].produced.any() and same_bits(*both)
    if drafts is not None:
        assert both[0][1].drafted.any()


@NAMES
def test_a_sequence_has_the_same_bits_alone_and_among_longer_ones(name):
    alone, among = rows_of(name, {0: SHORT})[0], rows_of(name, {0: SHORT, 1: LONG})
    assert same_bits(text_and_reads(alone), text_and_reads(among[0]))
    assert same_bits(text_and_reads(rows_of(name, {1: LONG})[1]), text_and_reads(among[1]))


@pytest.mark.parametrize("name", ["certified", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_a_long_sequence_reads_what_it_reads_without_a_least_context(name):
    rows, plain = (rows_of(name, {1: LONG}, least)[1] for least in (LEAST, 1))
    held = -(-rows.signals.length // PAGE) * MODEL.num_layers * MODEL.num_kv_heads
    assert (rows.signals.blocks_read < held).any()
    assert same_bits(text_and_reads(rows), text_and_reads(plain))


def test_scoring_begins_with_the_token_that_reaches_the_least_context():
    rows = rows_of("certified", {0: LEAST - 4})[0]
    scored = ~np.isnan(rows.signals.attention_entropy)
    np.testing.assert_array_equal(scored, rows.signals.length >= LEAST)
    assert scored.any() and not scored.all() and math.isfinite(rows.signals.entropy.sum())
