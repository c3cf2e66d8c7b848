"""A burst of steps starts before the last one is fetched, unless the host may have to act between the two."""

import pytest
from reopened import PROMPTS, reopened, requested

from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

TWO = [requested(one, max_tokens=40) for one in PROMPTS[:2]]


def after_rounds(model, requests, measured) -> list:
    """What is measured of the replica after each round that serves the requests."""
    [replica], found = model.replicas().replicas, []
    advance = replica.advance

    def recorded() -> None:
        advance()
        found.append(measured(replica))

    replica.advance = recorded
    done = model.generate(requests)
    assert all(one.error is None for one in done)
    return found


def in_flight_after_rounds(model, requests) -> list[bool]:
    return after_rounds(model, requests, lambda replica: replica.bursts.in_flight)


def test_a_burst_runs_ahead_and_none_that_every_limit_forbids(two_slots):
    found = in_flight_after_rounds(reopened(two_slots), TWO)
    assert sum(found) > 1 and not found[-1]


@pytest.mark.parametrize(
    "requests",
    [[TWO[0], replace(TWO[1], deadline=9.0)], [TWO[0], requested("A", max_tokens=40, regex="[ab]{60}")]],
    ids=["deadline", "grammar"],
)
def test_no_burst_runs_ahead_of_what_the_host_sets_for_each(two_slots, requests):
    found = in_flight_after_rounds(reopened(two_slots), requests)
    assert len(found) > 3 and not any(found[: len(found) // 2])


def test_no_burst_runs_ahead_of_a_round_that_preempts(two_slots):
    model = reopened(two_slots, preempt_every=2)
    assert not any(in_flight_after_rounds(model, TWO)[::2]) and model.metrics.preemptions > 0


def test_a_burst_ahead_of_one_that_ended_a_sequence_runs_no_step_while_another_waits(two_slots):
    model = reopened(two_slots)
    asked_for = [requested(one, max_tokens=limit) for one, limit in zip(PROMPTS, (5, 10, 40), strict=True)]
    assert any(in_flight_after_rounds(model, asked_for))
    assert model.metrics.steps == 5 + 40


def test_no_burst_runs_ahead_without_pages_for_it(two_slots):
    """Each sequence fills 6 pages."""
    model = reopened(two_slots)
    model.replicas().replicas[0].pool._num_pages = 8
    requests = [requested(one, max_tokens=90) for one in PROMPTS[:2]]
    free = after_rounds(model, requests, lambda replica: replica.pool.num_free)
    assert min(free) >= 0 and model.metrics.preemptions == 1


def test_between_rounds_no_burst_is_in_flight(two_slots):
    model = reopened(two_slots)
    expected = [one.text for one in model.generate(TWO)]
    stream, texts, seen = model.stream(TWO), ["", ""], []
    for event in stream:
        texts[event.prompt_index] += event.text
        seen += model.replicas().each(lambda replica: replica.bursts.in_flight)
    assert texts == expected and len(seen) > 50 and not any(seen)
