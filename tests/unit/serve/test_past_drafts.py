"""How drafts fared in earlier texts: what it is told as, and what texts lose and gain that begin by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.draft import (
    FIRST_CREDIT,
    MOST_CREDIT,
    DraftLength,
    RooflineLength,
    StepTimes,
    started,
    updated,
)
from et_jax.serve.past_drafts import FORGOTTEN, MOST_SAVED, DraftRecord
from et_jax.types import replace

TIMES = StepTimes(plain=3.0, plain_cached=6e-4, drafted=3.0, drafted_cached=6e-5, row=0.15, row_cached=6e-5)
CONTEXT = 60_000
NO_ENTROPY = jnp.float32(0)
_updated = jax.jit(updated)


def test_shares_and_credit_are_counted():
    """Of 6 tried 3 were accepted, beside 3.6 of 4 supposed; after a thousand steps more they count for half."""
    record = DraftRecord()
    record.note(10, tried=6, accepted=3, saved=-0.5)
    told = record.told()
    assert told.acceptance == pytest.approx(6.6 / 10) and told.credit == pytest.approx(FIRST_CREDIT - 0.5 + 0.1)
    record.note(int(FORGOTTEN), tried=0, accepted=0, saved=0.0)
    assert record.told().acceptance == pytest.approx(5.1 / 7) and record.told().credit == MOST_SAVED


def texts(record: DraftRecord, num: int, holds: float, rng: np.random.Generator, tokens: int = 60) -> list[float]:
    """Walk texts one after another, by the law's own times, told of the past every eight steps.

    Returns the plain steps that each took.
    """
    law: DraftLength = RooflineLength(TIMES, past=record.told())
    costs = [float(cost) for cost in jax.vmap(law.cost, (0, None))(jnp.arange(17), jnp.int32(CONTEXT))]
    took, steps = [], 0
    for _ in range(num):
        known = law.by_past(started(law, jnp.int32(12)))
        known, at, spent = replace(known, length=jnp.int32(0)), 0, 0.0
        while at < tokens:
            drafted = min(int(known.length), tokens - at - 1)
            held = next((i for i in range(drafted) if rng.random() >= holds), drafted)
            step = 1.0 + (costs[drafted] if drafted else 0.0)
            at, spent, steps = at + held + 1, spent + step, steps + 1
            record.note(1, min(held + 1, drafted), held, held + 1.0 - step)
            if steps % 8 == 0:
                law = law.told(TIMES, 1.15, float(CONTEXT), record.told())
            counts = jnp.int32(drafted), jnp.int32(held)
            known = _updated(law, known, jnp.bool_(True), *counts, NO_ENTROPY, jnp.int32(CONTEXT))
        took.append(spent)
    return took


def test_drafts_that_never_hold_cost_all_texts_what_one_may_lose():
    """Twenty texts lose eight plain steps together, and a hundredth, and one draft that was made before it is told."""
    took = texts(DraftRecord(), 20, 0.0, np.random.default_rng(7))
    assert sum(took) <= 20 * 60 * 1.01 + FIRST_CREDIT + 1.1
    assert max(took[1:]) <= 60 * 1.02 + 1.1


def test_texts_after_some_whose_drafts_seldom_held_lose_less():
    """Than texts of which each begins knowing nothing, drafts holding alike: those lose what one text may."""
    record, rng = DraftRecord(), np.random.default_rng(7)
    known = texts(record, 16, 0.3, rng)
    unknown = [texts(DraftRecord(), 1, 0.3, rng)[0] for _ in range(16)]
    assert np.mean(known[1:]) < 60.6 < 62.6 < np.mean(unknown) < 60 * 1.01 + MOST_CREDIT


def test_what_did_not_hold_is_tried_again_and_found_to_hold():
    record, rng = DraftRecord(), np.random.default_rng(7)
    texts(record, 20, 0.0, rng)
    assert np.mean(texts(record, 40, 0.9, rng)[-10:]) < 40
