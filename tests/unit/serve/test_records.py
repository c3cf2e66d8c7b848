"""A burst as records: what each token is charged, of one model or of two, work by its formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PAGE

from et_jax.decode import cost
from et_jax.decode.fresh import blank_signals
from et_jax.decode.output import Audit, StepOutput
from et_jax.decode.work import Work
from et_jax.serve.completions import TokenTrace
from et_jax.serve.records import Burst, Charge
from et_jax.types import replace

STEPS, SLOTS = 3, 3
NUM_MULTIPLIED = 700
HEADS = {"heads": MODEL.num_layers * MODEL.num_kv_heads, "group_size": MODEL.group_size, "head_dim": MODEL.head_dim}
MODEL_COST = cost.Model(weights=6000, block=10, summary=1, num_multiplied=NUM_MULTIPLIED, **HEADS)


def work(**figures) -> Work:
    """Work of no tokens, but for the figures given."""
    dtypes = dict.fromkeys(("tokens", "passes", "blocks", "summaries"), jnp.int32) | {"attended": jnp.float32}
    given = {name: dtype(figures.get(name, 0)) for name, dtype in dtypes.items()}
    return Work(**{name: jnp.broadcast_to(x, (STEPS, SLOTS)) for name, x in given.items()})


def at(step: int, *of_slots: int) -> np.ndarray:
    """The numbers of the slots at one step, and 0 at all others."""
    return np.where(np.arange(STEPS)[:, None] == step, of_slots, 0)


@pytest.fixture(scope="module")
def output() -> StepOutput:
    """Slot 2 fails at step 1, slot 0 finishes there; every number tells its step and slot."""
    number = np.arange(STEPS * SLOTS, dtype=np.int32).reshape(STEPS, SLOTS)
    produced = np.asarray([[1, 1, 1], [1, 1, 0], [0, 1, 0]])
    signals = replace(
        blank_signals((STEPS, SLOTS)),
        entropy=jnp.float32(number),
        length=jnp.int32(number + 5),
        allocated_pages=jnp.int32(-(-(number + 5) // PAGE)),
        blocks_read=jnp.int32(number + 1),
        summaries_read=jnp.int32(number * 0 + 2),
    )
    return StepOutput(
        token=jnp.int32(number + 40),
        produced=jnp.asarray(produced, bool),
        finished=jnp.asarray([[0, 0, 0], [1, 0, 0], [0, 0, 0]], bool),
        fault=jnp.int32([[0, 0, 0], [0, 0, 4], [0, 0, 0]]),
        refused=jnp.zeros((STEPS, SLOTS), bool),
        temperature=jnp.float32(number / 4),
        entropic_time=jnp.float32(number / 2),
        total_cost=jnp.zeros((STEPS, SLOTS), jnp.float32),
        drafted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        accepted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        work=(work(tokens=produced, passes=1, blocks=number + 1, summaries=2, attended=(number + 1) * PAGE),),
        guard_rates={"stability": jnp.float32(number / 8)},
        signals=signals,
        top_tokens=jnp.int32(number[..., None] + np.arange(4)),
        top_logprobs=-jnp.float32(number[..., None] + np.arange(4)),
    )


def told_of(output: StepOutput) -> StepOutput:
    """The output of steps that bring a token each."""
    return jax.tree.map(lambda x: np.asarray(x)[:, None], output)


def burst(output: StepOutput) -> Burst:
    return Burst((MODEL_COST,), told_of(output), STEPS)


def trace(of: Burst, step: int, position: int, slot: int, sharing: int) -> TokenTrace:
    """The record of a token that was produced."""
    found = of.row(step, position, slot, 0, sharing).trace
    assert found is not None
    return found


def in_one_step(output: StepOutput) -> StepOutput:
    """The steps as positions of one, whose weights are read once."""
    once = tuple(replace(each, passes=each.passes.at[1:].set(0)) for each in output.work)
    stacked = jax.tree.map(lambda x: jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1))[None], replace(output, work=once))
    return jax.device_get(stacked)


def test_tokens_of_one_step_share_its_weights_and_the_first_pays_for_what_was_rejected(output):
    """The three steps become positions of one step: slot 1 got three tokens, and two of four drafted were accepted."""
    drafts = {name: getattr(output, name).at[0, 1].set(n) for name, n in (("drafted", 4), ("accepted", 2))}
    [done] = output.work
    rejected = {"tokens": 2, "blocks": 7, "summaries": 5, "attended": 7 * PAGE}
    more = replace(done, **{name: getattr(done, name).at[0, 1].add(each) for name, each in rejected.items()})
    one = Burst((MODEL_COST,), in_one_step(replace(output, work=(more,), **drafts)), 1)
    assert (one.num_positions(0), one.num_served(0, range(SLOTS)), one.num_sharing(0, range(SLOTS))) == (3, 3, 6)
    rows = [trace(one, 0, position, 1, sharing=6) for position in range(3)]
    assert [(row.token, row.drafted, row.accepted) for row in rows] == [(41, 4, True), (44, 0, True), (47, 0, False)]
    plain = [trace(burst(output), step, 0, 1, sharing=6) for step in range(3)]
    costs = [row.cost - other.cost for row, other in zip(rows, plain, strict=True)]
    assert costs == pytest.approx([10 * 7 + 5, 0, 0])
    flops = [row.flops - other.flops for row, other in zip(rows, plain, strict=True)]
    attention, looking = 4 * 7 * PAGE, 10 * 5
    width = MODEL.group_size * MODEL.head_dim
    assert flops == pytest.approx([2 * 2 * NUM_MULTIPLIED + (attention + looking) * width, 0, 0])


def test_reads_are_by_layer_and_head(output):
    shape = STEPS, SLOTS, MODEL.num_layers, MODEL.num_kv_heads
    reads = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    told = trace(burst(replace(output, reads=jnp.asarray(reads))), 1, 0, 1, sharing=1).reads
    assert told == tuple(map(tuple, reads[1, 1].tolist()))
    assert trace(burst(output), 1, 0, 1, sharing=1).reads is None


OTHER = cost.Model(weights=300, block=16, summary=0, num_multiplied=40, heads=2, group_size=2, head_dim=4)


def test_what_a_small_model_drafts_with_is_charged_to_what_came_of_it(output):
    """Two passes over 300 bytes of weights for six tokens; slot 1's first token pays for what was read for it."""
    own = work(tokens=at(0, 0, 3, 0), passes=at(0, 2, 2, 2), blocks=at(0, 0, 12, 0), attended=at(0, 0, 70, 0))
    one = Burst((MODEL_COST,), in_one_step(output), 1)
    two = Burst((MODEL_COST, OTHER), in_one_step(replace(output, work=(*output.work, own))), 1)
    places = (0, 0), (0, 1), (1, 1)
    more = [(trace(two, 0, *place, sharing=6), trace(one, 0, *place, sharing=6)) for place in places]
    assert [a.cost - b.cost for a, b in more] == pytest.approx([100, 100 + 12 * 16, 100])
    assert [a.flops - b.flops for a, b in more] == pytest.approx([0, 3 * 2 * 40 + 4 * 4 * 2 * 70, 0])
    coded = cost.flops(dataclasses.replace(OTHER, codes=16), 3, 5.0, 7)  # each of a block's 8-bit keys costs too
    assert coded == 3 * 2 * 40 + (4 * 5 + (4 + 2 * 16) * 7) * OTHER.group_size * OTHER.head_dim


def test_a_token_of_two_models_pays_for_both_since_the_last(output):
    """The model's step brings slot 0 no token, for the other is to say it; slot 1 gets one, and both share the pass.

    In the next step the small model says slot 0's token. The model had read five tokens of it, in two reads.
    """
    big = dataclasses.replace(OTHER, weights=6000, num_multiplied=700, heads=4, block=32)
    model = work(tokens=at(0, 5, 1, 0), passes=at(0, 2, 2, 2), blocks=at(0, 8, 4, 0), attended=at(0, 90, 0, 0))
    small = work(tokens=at(1, 1, 0, 0), passes=at(1, 1, 1, 1), blocks=at(1, 2, 0, 0), attended=at(1, 16, 0, 0))
    spoken = jnp.zeros((STEPS, SLOTS), bool)
    asked = jnp.zeros((STEPS, SLOTS), jnp.int32)
    told = replace(
        output,
        produced=spoken.at[0, 1].set(True).at[1, 0].set(True),
        fault=asked,
        by_small=spoken.at[1, 0].set(True),
        work=(model, small),
        audit=Audit(audited=asked.at[0, 0].set(4).at[1, 0].set(1), agreed=asked.at[0, 0].set(3)),
    )
    both = Burst((big, OTHER), told_of(told), STEPS)
    assert [both.num_sharing(step, range(SLOTS)) for step in (0, 1)] == [2, 1]
    waiting = both.row(0, 0, 0, 0, 2)
    assert waiting.trace is None and waiting.unpaid.cost == 2 * 6000 / 2 + 8 * 32
    row = both.row(1, 0, 0, 0, 1, waiting.unpaid)
    assert row.unpaid == Charge() and row.trace is not None and row.trace.by_small
    assert row.trace.cost == 2 * 6000 / 2 + 8 * 32 + 300 + 2 * 16
    assert row.trace.flops == 5 * 2 * 700 + 4 * 4 * 2 * 90 + 2 * 40 + 4 * 4 * 2 * 16
    assert (row.trace.audited, row.trace.agreed) == (5, 3)
    assert row.trace.blocks_held == -(-int(output.signals.length[1, 0]) // PAGE) * OTHER.heads
    by_model = trace(both, 0, 0, 1, sharing=2)
    assert by_model.cost == 2 * 6000 / 2 + 4 * 32 and by_model.audited == 0
