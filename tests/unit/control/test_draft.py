"""Lengths of drafts: the best by the formula, all or nothing by entropy, and what is remembered of a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control import draft
from et_jax.control.draft import EntropyLength, FixedLength, PastDrafts, StepTimes
from et_jax.control.draft_speed import AcceptanceLength, RooflineLength
from et_jax.types import replace

NO_ENTROPY = jnp.float32(0)
_length = jax.jit(lambda law, known, entropy, context: law.length(known, entropy, context))
_updated = jax.jit(draft.updated)


def state(most: int = 16, **changes) -> draft.DraftState:
    fields = {"length": 0, "acceptance": 0.5, "since": 0, "credit": 99.0} | changes
    kinds = {"length": jnp.int32, "acceptance": jnp.float32, "since": jnp.int32, "credit": jnp.float32}
    return draft.DraftState(most=jnp.int32(most), **{name: kinds[name](value) for name, value in fields.items()})


def length(law, *, entropy: float = 0.0, context: int = 0, **changes) -> int:
    return int(_length(law, state(**changes), jnp.float32(entropy), jnp.int32(context)))


def after(law, known, *, drafted: int, accepted: int, stepped: bool = True, context: int = 0) -> draft.DraftState:
    """The state after a step."""
    counts = jnp.int32(drafted), jnp.int32(accepted)
    return _updated(law, known, jnp.bool_(stepped), *counts, NO_ENTROPY, jnp.int32(context))


def brought(acceptance: float, length: int) -> float:
    return sum(acceptance**k for k in range(length + 1))


@pytest.mark.parametrize("row_cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("widths", [(), (4.0, 8.0)])
def test_the_length_is_the_one_of_the_greatest_expected_speed(row_cost, widths):
    """A draft costs the least width that has room for it, and its own length where none has."""

    def speed(acceptance: float, length: int) -> float:
        width = min((width for width in widths if length and width >= length), default=length)
        return brought(acceptance, length) / (1 + row_cost * width)

    for acceptance in (0.0, 0.1, 0.2, 0.35, 0.6, 0.9, 1.0):
        found = length(AcceptanceLength(row_cost, widths=widths), acceptance=acceptance)
        expected = max(speed(acceptance, length) for length in range(17))
        assert speed(acceptance, found) == pytest.approx(expected, rel=1e-6)


def test_a_sequence_whose_drafts_fail_drafts_now_and_then():
    law = AcceptanceLength(row_cost=0.1, retry=5)
    assert [length(law, acceptance=0.01, since=since) for since in range(7)] == [0, 0, 0, 0, 0, 1, 1]
    assert length(law, most=0, acceptance=0.01, since=99) == 0
    assert length(AcceptanceLength(0.1, widths=(4.0, 8.0)), acceptance=0.01, since=99) == 4  # for the price of one
    assert AcceptanceLength(0.1, widths=(4.0, 8.0)).at(0.5).retry == 200  # a hundredth: 2 for four tokens


def test_no_length_passes_what_the_request_allows_and_entropy_lets_a_certain_model_draft():
    for law in (AcceptanceLength(), EntropyLength(), FixedLength()):
        for most in (0, 1, 3):
            assert int(after(law, state(most, acceptance=0.99), drafted=most, accepted=most).length) == most
    assert [length(EntropyLength(0.6), most=8, entropy=entropy) for entropy in (0.0, 0.59, 0.61, 5.0)] == [8, 8, 0, 0]


def test_a_sequence_of_which_nothing_is_known_drafts_little():
    """Of half of the tokens accepted 1.5 / 1.3 is more than 1.75 / 1.6, and 1 more than 1.5 / 1.6."""
    by_widths = AcceptanceLength(0.1, widths=(4.0, 8.0))  # four for the price of one
    little, more = [0, 1, 1, 1], [0, 1, 4, 4]
    laws = {FixedLength(): more, AcceptanceLength(0.3): little, AcceptanceLength(0.6): little, by_widths: more}
    for law, lengths in laws.items():
        assert draft.started(law, jnp.asarray([0, 1, 4, 12], jnp.int32)).length.tolist() == lengths, law


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (4, 0), (4, 2), (4, 4), (1, 1)])
def test_each_token_that_was_tried_moves_the_running_share_once(drafted, accepted):
    """Token by token in float64: those accepted, then the first that was not; those behind it say nothing."""
    share, tried = 0.3, [1.0] * accepted + [0.0] * (drafted > accepted)
    mean = float(np.mean(tried)) if tried else 0.0
    for _ in tried:
        share = 0.9 * share + 0.1 * mean
    before = state(acceptance=0.3, since=4, length=2, credit=0.5)
    found = after(FixedLength(), before, drafted=drafted, accepted=accepted)
    assert float(found.acceptance) == pytest.approx(share, rel=1e-5)
    assert int(found.since) == (0 if drafted else 5)
    unserved = after(FixedLength(), before, drafted=drafted, accepted=accepted, stepped=False)
    for name in ("most", "length", "acceptance", "since", "credit"):
        assert np.array_equal(getattr(unserved, name), getattr(before, name)), name


TIMES = StepTimes(plain=3.0, plain_cached=6e-4, drafted=3.0, drafted_cached=6e-5, row=0.15, row_cached=6e-5)
ROOFLINE = RooflineLength(TIMES, past=PastDrafts(credit=99.0))
AT = 60_000
TOKEN = 10.35 / 39  # plain steps of a drafted token at 60,000 tokens, where a plain step takes 39


def self_speed(acceptance: float, length: int, context: int) -> float:
    """Tokens a plain step's time, in float64, from what each part takes of one reading of the weights."""
    cache = 2e-4 * context
    drafted, verified = length * (1 + 0.1 * cache), 1 + 0.05 * length + cache * (1 + 0.1 * length)
    return brought(acceptance, length) * (1 + cache) / (drafted + verified)


@pytest.mark.parametrize("context", [100, 4000, 16_000, 60_000, 300_000])
def test_a_model_that_drafts_for_itself_drafts_as_its_text_is_long(context):
    for acceptance in (0.3, 0.8, 0.97, 1.0):
        found = length(ROOFLINE, acceptance=acceptance, context=context)
        best = max(self_speed(acceptance, length, context) for length in range(17))
        best = best if best >= 1.15 else 1.0  # what gains less is not drafted
        assert self_speed(acceptance, found, context) == pytest.approx(best, rel=1e-6)
    assert length(ROOFLINE.waiting(), acceptance=1.0, context=context) == 0


def test_drafts_that_fail_are_tried_again_when_that_costs_a_hundredth_and_could_pay():
    """One token more at 16,000 costs 1.32 + 0.05 + 0.32 of 4.2 readings: as much as a hundredth of 40.2 steps."""
    found = [length(ROOFLINE, acceptance=0.01, since=since, context=16_000) for since in (0, 40, 41)]
    assert found == [0, 0, 1]
    assert length(ROOFLINE, acceptance=1.0, since=10_000, context=100) == 0


@pytest.mark.parametrize(
    ("own", "of_all", "most"),
    [(-0.1, 99, 0), (0.26, 99, 0), (0.27, 99, 1), (1.07, 99, 4), (4.3, 99, 16), (4, -0.1, 0), (4, 0.27, 1)],
)
def test_no_draft_costs_more_than_a_sequence_and_all_sequences_have_credit_for(own, of_all, most):
    law = replace(ROOFLINE, past=PastDrafts(credit=of_all))
    assert length(law, acceptance=1.0, credit=own, context=AT) == most
    assert float(law.cost(jnp.int32(most), jnp.int32(AT))) == pytest.approx(most * TOKEN, rel=1e-5)


def test_what_drafts_save_is_counted_up_to_a_bound():
    """Three of four drafted tokens were accepted: three plain steps, less what four cost, and a hundredth."""
    found = after(ROOFLINE, state(credit=0.5), drafted=4, accepted=3, context=AT)
    assert float(found.credit) == pytest.approx(0.5 + 0.01 + 3.0 - 4 * TOKEN, rel=1e-5)
    assert float(after(ROOFLINE, found, drafted=4, accepted=3, context=AT).credit) == 4.0
    # the running share is of the last thirty tokens, and its law speaks of them token by token
    assert float(found.acceptance) == pytest.approx(0.97**4 * 0.5 + (1 - 0.97**4) * 0.75, rel=1e-5)


@pytest.mark.parametrize(("acceptance", "credit"), [(0.99, 4.0), (0.2, 4.0), (0.9, -0.1)])
def test_sequences_of_one_batch_use_the_same_draft_length(acceptance, credit):
    """By the acceptance rate and the credit of all, whatever their own are."""
    for of_all in (0.9, 0.3):
        law = replace(ROOFLINE, past=PastDrafts(of_all, 99.0, several=1.0))
        best = max(range(17), key=lambda length, p=of_all: self_speed(p, length, AT))
        expected = best if self_speed(of_all, best, AT) >= 1.15 else 0
        assert length(law, acceptance=acceptance, credit=credit, context=AT) == expected
