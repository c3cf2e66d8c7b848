"""Lengths of drafts: the best by the formula, all or nothing by entropy, and what is remembered of a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control import draft
from et_jax.control.draft import AcceptanceLength, EntropyLength, FixedLength, PastDrafts, RooflineLength, StepTimes
from et_jax.types import replace

NO_ENTROPY, NO_TEXT = jnp.float32(0), jnp.int32(0)


def state(most: int = 8, **changes) -> draft.DraftState:
    fields = {"length": 0, "acceptance": 0.5, "since": 0, "credit": 99.0} | changes
    kinds = {"length": jnp.int32, "acceptance": jnp.float32, "since": jnp.int32, "credit": jnp.float32}
    return draft.DraftState(most=jnp.int32(most), **{name: kinds[name](value) for name, value in fields.items()})


def speed(acceptance: float, length: int, row_cost: float) -> float:
    return sum(acceptance**k for k in range(length + 1)) / (1 + row_cost * length)


@pytest.mark.parametrize("row_cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.35, 0.6, 0.9, 1.0])
def test_the_length_is_the_one_of_the_greatest_expected_speed(acceptance, row_cost):
    found = AcceptanceLength(row_cost).length(state(most=16, acceptance=acceptance), NO_ENTROPY, NO_TEXT)
    expected = max(range(17), key=lambda length: speed(acceptance, length, row_cost))
    assert speed(acceptance, int(found), row_cost) == pytest.approx(speed(acceptance, expected, row_cost), rel=1e-6)


def test_a_sequence_whose_drafts_fail_drafts_one_token_now_and_then():
    law = AcceptanceLength(row_cost=0.1, retry=5)
    found = [int(law.length(state(acceptance=0.01, since=since), NO_ENTROPY, NO_TEXT)) for since in range(7)]
    assert found == [0, 0, 0, 0, 0, 1, 1]
    assert int(law.length(state(most=0, acceptance=0.01, since=99), NO_ENTROPY, NO_TEXT)) == 0


def test_no_length_passes_what_the_request_allows():
    for law in (AcceptanceLength(), EntropyLength(), FixedLength()):
        for most in (0, 1, 3):
            counts = jnp.int32(most), jnp.int32(most)
            after = draft.updated(law, state(most, acceptance=0.99), jnp.bool_(True), *counts, NO_ENTROPY, NO_TEXT)
            assert int(after.length) == most


def test_little_is_drafted_of_what_nothing_is_known():
    most = jnp.asarray([0, 1, 4, 12], jnp.int32)
    assert draft.started(FixedLength(), most).length.tolist() == [0, 1, 4, 4]
    # of half of the tokens accepted: 1.5 / 1.3 is more than 1.75 / 1.6, and 1 more than 1.5 / 1.6
    assert draft.started(AcceptanceLength(0.3), most).length.tolist() == [0, 1, 1, 1]
    assert draft.started(AcceptanceLength(0.6), most).length.tolist() == [0, 1, 1, 1]
    # four for the price of one
    assert draft.started(AcceptanceLength(0.1, widths=(4.0, 8.0)), most).length.tolist() == [0, 1, 4, 4]


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.2, 0.35, 0.6, 0.9, 1.0])
def test_a_draft_costs_the_least_width_that_holds_it(acceptance):
    law = AcceptanceLength(0.1, widths=(4.0, 8.0))
    found = int(law.length(state(most=16, acceptance=acceptance), NO_ENTROPY, NO_TEXT))

    def width_speed(length: int) -> float:
        width = 0 if length == 0 else 4 if length <= 4 else 8 if length <= 8 else length
        return sum(acceptance**k for k in range(length + 1)) / (1 + 0.1 * width)

    assert width_speed(found) == pytest.approx(max(map(width_speed, range(17))), rel=1e-6)
    assert int(law.length(state(acceptance=0.01, since=99), NO_ENTROPY, NO_TEXT)) == 4


def test_entropy_lets_a_certain_model_draft():
    found = [
        int(EntropyLength(0.6).length(state(), jnp.float32(entropy), NO_TEXT)) for entropy in (0.0, 0.6, 0.61, 5.0)
    ]
    assert found == [8, 8, 0, 0]


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (4, 0), (4, 2), (4, 4), (1, 1)])
def test_each_token_that_was_tried_moves_the_running_share_once(drafted, accepted):
    """Token by token in float64: those accepted, then the first that was not; those behind it say nothing."""
    share, tried = 0.3, [1.0] * accepted + [0.0] * (drafted > accepted)
    mean = float(np.mean(tried)) if tried else 0.0
    for _ in tried:
        share = 0.9 * share + 0.1 * mean
    after = draft.updated(
        FixedLength(),
        state(acceptance=0.3, since=4),
        jnp.bool_(True),
        jnp.int32(drafted),
        jnp.int32(accepted),
        NO_ENTROPY,
        NO_TEXT,
    )
    assert float(after.acceptance) == pytest.approx(share, rel=1e-5)
    assert int(after.since) == (0 if drafted else 5)


def test_what_was_not_served_is_as_it_was():
    before = state(acceptance=0.3, since=4, length=2, credit=0.5)
    after = draft.updated(FixedLength(), before, jnp.bool_(False), jnp.int32(4), jnp.int32(4), NO_ENTROPY, NO_TEXT)
    assert after == before or all(
        np.array_equal(getattr(after, name), getattr(before, name))
        for name in ("most", "length", "acceptance", "since", "credit")
    )


TIMES = StepTimes(plain=3.0, plain_cached=6e-4, drafted=3.0, drafted_cached=6e-5, row=0.15, row_cached=6e-5)
ROOFLINE = RooflineLength(TIMES, past=PastDrafts(credit=99.0))


def self_speed(acceptance: float, length: int, context: int) -> float:
    """Tokens a plain step's time, in float64, from what each part takes of one reading of the weights."""
    cache = 2e-4 * context
    drafted, verified = length * (1 + 0.1 * cache), 1 + 0.05 * length + cache * (1 + 0.1 * length)
    return sum(acceptance**k for k in range(length + 1)) * (1 + cache) / (drafted + verified)


@pytest.mark.parametrize("context", [100, 4000, 16_000, 60_000, 300_000])
@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.97, 1.0])
def test_a_model_that_drafts_for_itself_drafts_as_its_text_is_long(acceptance, context):
    found = int(ROOFLINE.length(state(most=16, acceptance=acceptance), NO_ENTROPY, jnp.int32(context)))
    best = max(self_speed(acceptance, length, context) for length in range(17))
    best = best if best >= 1.15 else 1.0  # what gains less is not drafted
    assert self_speed(acceptance, found, context) == pytest.approx(best, rel=1e-6)


def test_of_a_short_text_nothing_is_ever_drafted():
    for since in (0, 10_000):
        found = ROOFLINE.length(state(acceptance=1.0, since=since), NO_ENTROPY, jnp.int32(100))
        assert int(found) == 0


def test_drafts_that_fail_are_tried_again_when_that_costs_a_hundredth():
    """One token more at 16,000 costs 1.32 + 0.05 + 0.32 of 4.2 readings: as much as a hundredth of 40.2 steps."""
    found = [
        int(ROOFLINE.length(state(acceptance=0.01, since=since), NO_ENTROPY, jnp.int32(16_000)))
        for since in (0, 40, 41)
    ]
    assert found == [0, 0, 1]


def test_no_draft_costs_more_than_there_is_credit_for():
    """At 60,000 tokens a plain step takes 39; k drafted tokens 10.35 k more: 0.265 of a plain step each."""
    for credit, most in ((-0.1, 0), (0.0, 0), (0.26, 0), (0.27, 1), (1.0, 3), (1.07, 4), (4.3, 16)):
        found = ROOFLINE.length(state(most=16, acceptance=1.0, credit=credit), NO_ENTROPY, jnp.int32(60_000))
        assert int(found) == most, credit
        assert float(ROOFLINE.cost(found, jnp.int32(60_000))) == pytest.approx(most * 10.35 / 39, rel=1e-5)


@pytest.mark.parametrize("holds", [0.0, 0.45, 0.6])
@pytest.mark.parametrize("context", [8_000, 60_000, 300_000])
def test_a_text_loses_four_steps_and_a_hundredth_of_the_others_at_most(holds, context):
    """Whatever holds, by the law's own times: a walk of 400 tokens, in plain steps, against its 400 plain ones."""
    rng, at, spent = np.random.default_rng(3), 0, 0.0
    updated = jax.jit(draft.updated)
    law = RooflineLength(TIMES)
    known = law.by_past(state(most=12))
    costs = [float(cost) for cost in jax.vmap(ROOFLINE.cost, (0, None))(jnp.arange(17), jnp.int32(context))]
    steps = 0
    while at < 400:
        drafted = int(known.length)
        held = next((i for i in range(drafted) if rng.random() >= holds), drafted)
        at, spent = at + held + 1, spent + 1.0 + (drafted and costs[drafted])
        steps += 1
        counts = jnp.int32(drafted), jnp.int32(held)
        known = updated(law, known, jnp.bool_(True), *counts, NO_ENTROPY, jnp.int32(context))
    assert spent <= at + draft.MOST_CREDIT + 0.01 * steps + 1e-3


def test_what_drafts_save_is_counted_up_to_a_bound():
    """Three of four drafted tokens held: three plain steps, less 4 x 10.35 / 39, and a hundredth."""
    counts = jnp.int32(4), jnp.int32(3)
    at = jnp.int32(60_000)
    after = draft.updated(ROOFLINE, state(credit=0.5), jnp.bool_(True), *counts, NO_ENTROPY, at)
    assert float(after.credit) == pytest.approx(0.5 + 0.01 + 3.0 - 4 * 10.35 / 39, rel=1e-5)
    again = draft.updated(ROOFLINE, after, jnp.bool_(True), *counts, NO_ENTROPY, at)
    assert float(again.credit) == 4.0


def test_laws_that_are_told_times_go_by_them():
    """A drafted token that takes 2.5 of a plain step's 5 at 1000 tokens; of a law without times nothing is other."""
    times = StepTimes(plain=4.0, plain_cached=1e-3, drafted=1.0, drafted_cached=2e-4, row=1.0, row_cached=3e-4)
    past = PastDrafts(acceptance=0.3, credit=0.5)
    told = AcceptanceLength(0.1, widths=(4.0, 8.0)).told(times, 1.5, 1000.0, past)
    assert told == AcceptanceLength(0.5, retry=200, widths=(4.0, 8.0))
    assert ROOFLINE.told(times, 1.5, 1000.0, past) == RooflineLength(times, 1.5, past=past)
    for law in (FixedLength(), EntropyLength()):
        assert law.told(times, 1.5, 1000.0, past) == law


def test_a_text_begins_by_what_is_told_of_earlier_ones():
    begun = replace(ROOFLINE, past=PastDrafts(acceptance=0.3, credit=0.5)).by_past(state(most=7))
    assert (float(begun.acceptance), float(begun.credit), int(begun.most)) == (pytest.approx(0.3), 0.5, 7)
    new = RooflineLength(TIMES).by_past(state())
    assert (float(new.acceptance), float(new.credit)) == (pytest.approx(0.9), draft.MOST_CREDIT)
    lookups = AcceptanceLength(0.1)
    assert lookups.by_past(state(acceptance=0.7)).acceptance == pytest.approx(0.7)


def test_no_draft_costs_more_than_all_texts_have_credit_for():
    """Whatever a text has saved itself: at 60,000 tokens a drafted token costs 0.265 of a plain step."""
    for credit, most in ((-0.1, 0), (0.26, 0), (0.27, 1), (1.07, 4)):
        law = replace(ROOFLINE, past=PastDrafts(credit=credit))
        found = law.length(state(most=16, acceptance=1.0, credit=4.0), NO_ENTROPY, jnp.int32(60_000))
        assert int(found) == most, credit


def test_texts_written_at_once_draft_alike_by_what_all_of_them_know():
    """Whatever held of a text's own drafts, and whatever these cost: at 60,000 tokens 0.9 of all held, or 0.3."""
    for acceptance, credit in ((0.99, 4.0), (0.2, 4.0), (0.9, -0.1)):
        own = state(most=16, acceptance=acceptance, credit=credit)
        lengths = [
            int(replace(ROOFLINE, past=PastDrafts(share, 99.0, several=1.0)).length(own, NO_ENTROPY, jnp.int32(60_000)))
            for share in (0.9, 0.3)
        ]
        expected = [max(range(17), key=lambda k, p=share: self_speed(p, k, 60_000)) for share in (0.9, 0.3)]
        assert lengths == [expected[0], expected[1] if self_speed(0.3, expected[1], 60_000) >= 1.15 else 0]


def test_times_of_sequences_alike_are_those_of_one_as_often():
    found = TIMES.alike(3.0, 5.0)
    assert found == StepTimes(
        plain=3.0, plain_cached=18e-4, drafted=3.0, drafted_cached=18e-5, row=0.75, row_cached=18e-5
    )
