"""A burst as records: each slot's own numbers, the weights shared by those served, work by its formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PAGE, configuration

from et_jax.control.controller import Controller
from et_jax.control.switch import AsPrinted
from et_jax.decode import cost
from et_jax.decode.draft import Drafting
from et_jax.decode.fresh import blank_signals
from et_jax.decode.output import Spent, StepOutput
from et_jax.serve.records import Burst
from et_jax.types import replace

STEPS, SLOTS = 3, 3
TRAFFIC = cost.Traffic(weights=6000, block=10, summary=1)
NUM_MULTIPLIED = 700
MODEL_COST = cost.Model(
    weights=6000,
    num_multiplied=NUM_MULTIPLIED,
    heads=MODEL.num_layers * MODEL.num_kv_heads,
    token=8,
    group_size=MODEL.group_size,
    head_dim=MODEL.head_dim,
)


@pytest.fixture(scope="module")
def output() -> StepOutput:
    """Slot 2 fails at step 1, slot 0 finishes there; every number tells its step and slot."""
    number = np.arange(STEPS * SLOTS, dtype=np.int32).reshape(STEPS, SLOTS)
    signals = replace(
        blank_signals((STEPS, SLOTS)),
        entropy=jnp.float32(number),
        length=jnp.int32(number + 5),
        pages_held=jnp.int32(-(-(number + 5) // PAGE)),
        blocks_read=jnp.int32(number + 1),
        summaries_read=jnp.int32(number * 0 + 2),
    )
    return StepOutput(
        token=jnp.int32(number + 40),
        produced=jnp.asarray([[1, 1, 1], [1, 1, 0], [0, 1, 0]], bool),
        finished=jnp.asarray([[0, 0, 0], [1, 0, 0], [0, 0, 0]], bool),
        fault=jnp.int32([[0, 0, 0], [0, 0, 4], [0, 0, 0]]),
        refused=jnp.zeros((STEPS, SLOTS), bool),
        temperature=jnp.float32(number / 4),
        entropic_time=jnp.float32(number / 2),
        total_cost=jnp.zeros((STEPS, SLOTS), jnp.float32),
        drafted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        accepted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        blocks_wasted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        summaries_wasted=jnp.zeros((STEPS, SLOTS), jnp.int32),
        guard_rates={"stability": jnp.float32(number / 8)},
        signals=signals,
        top_tokens=jnp.int32(number[..., None] + np.arange(4)),
        top_logprobs=-jnp.float32(number[..., None] + np.arange(4)),
    )


def told_of(output: StepOutput) -> StepOutput:
    """The output of steps that bring a token each."""
    return jax.tree.map(lambda x: np.asarray(x)[:, None], output)


def burst(output: StepOutput, num_steps: int = STEPS) -> Burst:
    return Burst(configuration(), TRAFFIC, (MODEL_COST,), told_of(output), num_steps)


def test_each_record_is_of_its_step_and_slot(output):
    for step in range(STEPS):
        for slot in range(SLOTS):
            got, number = burst(output).row(step, 0, slot, 0, 1), step * SLOTS + slot
            assert (got.trace is not None) == bool(output.produced[step, slot])
            assert (got.finished, got.fault) == (bool(output.finished[step, slot]), int(output.fault[step, slot]))
            if got.trace is not None:
                one = got.trace
                assert (one.token, one.entropy, one.temperature) == (number + 40, number, number / 4)
                assert (one.entropic_time, one.guard_rates) == (number / 2, {"stability": number / 8})
                assert one.blocks_held == -(-(number + 5) // PAGE) * MODEL.num_layers * MODEL.num_kv_heads
                assert type(one.token) is int and type(one.entropy) is float and one.text == "" and one.top == ()


def test_the_weights_are_shared_by_those_served(output):
    served = [burst(output).num_served(step, range(SLOTS)) for step in range(STEPS)]
    assert served == [3, 2, 1] and burst(output).num_served(0, [1]) == 1
    rows = [burst(output).row(0, 0, slot, 0, served[0]).trace for slot in range(SLOTS)]
    own = [10 * (slot + 1) + 2 for slot in range(SLOTS)]
    assert sum(row.cost for row in rows if row is not None) == pytest.approx(6000 + sum(own))


def test_as_many_alternatives_as_are_asked_for(output):
    trace = burst(output).row(1, 0, 1, 2, 1).trace
    assert trace is not None and trace.top == ((4, -4.0), (5, -5.0))
    none = burst(replace(output, top_tokens=None, top_logprobs=None)).row(1, 0, 1, 2, 1).trace
    assert none is not None and none.top == ()


def test_steps_that_were_not_run_are_not_there(output):
    with pytest.raises(IndexError):
        burst(output, num_steps=1).row(1, 0, 0, 0, 1)


def test_tokens_of_one_step_share_its_weights_and_the_first_pays_for_what_was_rejected(output):
    """The three steps become positions of one step: slot 1 was brought three tokens, of four drafted two held."""
    drafts = Drafting(most=4)
    told = {"drafted": 4, "accepted": 2, "blocks_wasted": 7, "summaries_wasted": 5}
    drafted = replace(output, **{name: getattr(output, name).at[0, 1].set(number) for name, number in told.items()})
    stacked = jax.tree.map(lambda x: jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1))[None], drafted)
    one = Burst(configuration(draft=drafts), TRAFFIC, (MODEL_COST,), jax.device_get(stacked), 1)
    assert (one.num_positions(0), one.num_served(0, range(SLOTS)), one.num_produced(0, range(SLOTS))) == (3, 3, 6)
    rows = [one.row(0, position, 1, 0, 6).trace for position in range(3)]
    assert all(row is not None for row in rows)
    assert [row.token for row in rows if row] == [41, 44, 47]
    assert [row.drafted for row in rows if row] == [4, 0, 0]
    assert [row.accepted for row in rows if row] == [True, True, False]
    plain = [burst(output).row(step, 0, 1, 0, 6).trace for step in range(3)]
    more = [row.cost - other.cost for row, other in zip(rows, plain, strict=True) if row and other]
    assert more == pytest.approx([10 * 7 + 5, 0, 0])
    work = [row.flops - other.flops for row, other in zip(rows, plain, strict=True) if row and other]
    attention = cost.token_flops(0, 7 * PAGE, MODEL.group_size, MODEL.head_dim)
    looking = cost.selection_flops(5, MODEL.group_size, MODEL.head_dim, 0)
    assert work == pytest.approx([2 * 2 * NUM_MULTIPLIED + attention + looking, 0, 0])


OTHER = cost.Model(weights=300, num_multiplied=40, heads=2, token=8, group_size=2, head_dim=4)


def test_reads_are_by_layer_and_head_and_none_for_a_small_model(output):
    shape = STEPS, SLOTS, MODEL.num_layers, MODEL.num_kv_heads
    told = replace(output, reads=jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape))
    row = burst(told).row(1, 0, 1, 0, 1).trace
    first = (SLOTS + 1) * MODEL.num_layers * MODEL.num_kv_heads
    number = iter(range(first, first + MODEL.num_layers * MODEL.num_kv_heads))
    assert row is not None
    assert row.reads == tuple(tuple(next(number) for _ in range(shape[3])) for _ in range(shape[2]))
    silent = burst(output).row(1, 0, 1, 0, 1).trace
    assert silent is not None and silent.reads is None
    spent = Spent(
        tokens=jnp.zeros((STEPS, SLOTS, 2), jnp.int32),
        passes=jnp.zeros((STEPS, SLOTS, 2), jnp.float32),
        audited=None,
        agreed=None,
    )
    turns = replace(told, by_small=jnp.zeros((STEPS, SLOTS), bool).at[0, 0].set(True), spent=spent)
    config = configuration(controller=Controller(switch=AsPrinted(1.0)), small=MODEL)
    both = Burst(config, TRAFFIC, (OTHER, OTHER), told_of(turns), STEPS)
    by_small, by_model = (both.row(0, 0, slot, 0, 3).trace for slot in (0, 1))
    assert by_small is not None and by_small.reads is None
    assert by_model is not None and by_model.reads is not None


def test_what_a_small_model_drafts_with_is_charged_to_what_came_of_it(output):
    """Two passes over 300 bytes of weights for six tokens; slot 1's first token pays for what was read for it."""
    small = {"small_tokens": jnp.zeros((STEPS, SLOTS), jnp.int32).at[0, 1].set(3)}
    small["small_passes"] = jnp.zeros((STEPS, SLOTS), jnp.int32).at[0].set(2)
    stacked = jax.tree.map(lambda x: jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1))[None], replace(output, **small))
    config = configuration(draft=Drafting(most=4))
    one, two = (
        Burst(config, TRAFFIC, costs, jax.device_get(stacked), 1) for costs in ((MODEL_COST,), (MODEL_COST, OTHER))
    )
    more = [
        (two.row(0, position, slot, 0, 6).trace, one.row(0, position, slot, 0, 6).trace)
        for position, slot in ((0, 0), (0, 1), (1, 1))
    ]
    length = int(output.signals.length[0, 1])
    assert [a.cost - b.cost for a, b in more if a and b] == pytest.approx([100, 100 + 3 * length * 2 * 8, 100])
    per_token = 2 * 40 + 4 * 4 * 2 * length * 2
    assert [a.flops - b.flops for a, b in more if a and b] == pytest.approx([0, 3 * per_token, 0])


def test_a_token_of_two_models_pays_for_both_since_the_last(output):
    """Slot 0's first token is the small model's; before it the model read 5 tokens in a chunk and a third of a pass."""
    big = dataclasses.replace(OTHER, weights=6000, num_multiplied=700, heads=4)
    tokens = jnp.zeros((STEPS, SLOTS, 2), jnp.int32).at[0, 0].set(jnp.asarray([5, 1]))
    passes = jnp.zeros((STEPS, SLOTS, 2), jnp.float32).at[0, 0].set(jnp.asarray([0.25, 0.5]))
    told = replace(
        output,
        by_small=output.produced.at[:, 1:].set(False),
        spent=Spent(tokens=tokens, passes=passes, audited=None, agreed=None),
    )
    config = configuration(controller=Controller(switch=AsPrinted(1.0)), small=MODEL)
    row = Burst(config, TRAFFIC, (big, OTHER), told_of(told), STEPS).row(0, 0, 0, 0, 3).trace
    length = int(output.signals.length[0, 0])
    assert row is not None and row.by_small
    assert row.cost == pytest.approx(0.25 * 6000 + 0.5 * 300 + length * (4 * 8 + 2 * 8))
    assert row.flops == pytest.approx(5 * (2 * 700 + 4 * 4 * 2 * length * 4) + 2 * 40 + 4 * 4 * 2 * length * 2)
    assert row.blocks_held == -(-length // PAGE) * OTHER.heads
