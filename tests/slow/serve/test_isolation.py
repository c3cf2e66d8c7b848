"""What goes wrong with one request harms that one alone: the others keep every bit of their texts."""

import jax.numpy as jnp
import numpy as np
import pytest
from reopened import SENTENCE, asked, assert_balanced, bits, reopened, requested

from et_jax.control.base import Law, chain, claim
from et_jax.control.controller import Controller
from et_jax.serve.sequence import Sequence
from et_jax.types import replace, value

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def torn_where(monkeypatch, owner, name: str, fails) -> None:
    """Have a function fail where `fails` says so of its arguments."""
    whole = getattr(owner, name)

    def fragile(*given):
        if fails(*given):
            raise LookupError("torn")
        return whole(*given)

    monkeypatch.setattr(owner, name, fragile)


def test_a_failure_on_the_host_for_one_request_ends_that_one_alone(six_slots, monkeypatch, caplog):
    """In its settings, in the pool, as a token is delivered, and as an end is."""
    served, requests = reopened(six_slots), asked(six_slots.tokenizer, 6, longer=5)
    expected = reopened(six_slots).generate(requests)
    [replica] = served.replicas().replicas
    submit = replica.queue.submit

    def submit_fragile(sequence, deliver):
        def fragile(event):
            deliver(event)
            ended = event.completion is not None
            if sequence.request.params.seed == (4 if ended else 3) and len(sequence.trace) >= 5:
                raise LookupError("torn")

        submit(sequence, fragile)

    torn_where(monkeypatch, Sequence, "asked", lambda sequence, _: sequence.request.params.seed == 1)
    torn_where(monkeypatch, replica.pool, "begin", lambda slot: replica.slots.sequences[slot].request.params.seed == 2)
    monkeypatch.setattr(replica.queue, "submit", submit_fragile)
    done = served.generate(requests)
    for number, (one, other) in enumerate(zip(done, expected, strict=True)):
        if number in (1, 2, 3):
            assert one.finish_reason == "error" and "torn" in str(one.error) and "\n" not in str(one.error)
            assert other.text.startswith(one.text)
            assert one.token_ids == other.token_ids[: 5 * (number == 3)]
        else:
            assert bits(one) == bits(other) and one.error is None
    assert "could not be delivered" in caplog.text
    assert served.metrics.finished == {"length": 3, "error": 3}
    assert_balanced(served)


BAD = [
    ("temperature", np.nan),
    ("temperature", -1.0),
    ("temperature", np.inf),
    ("surprisal_cap", np.nan),
    ("tolerance", np.nan),
    ("entropy", np.nan),
    ("entropic_time", np.nan),
    ("entropic_time", np.inf),
    ("total_cost", np.nan),
    ("surprisal_cap", -np.inf),  # legitimate: all but the likeliest are barred,
    ("tolerance", -1.0),  # everything is open
]


@value
class Broken(Law):
    """Does BAD[i] to requests of temperature 1 + (i + 1) / 64, after the third token, from 2 on at once."""

    def init(self, state):
        number = jnp.round((state.temperature - 1.0) * 64).astype(jnp.int32)
        return claim(self, self._spoil(state, number - 64), "mine", jnp.where(number < 64, number, 0))

    def __call__(self, signals, state):
        return self._spoil(state, jnp.where(signals.generated == 3, state.records["mine"], 0))

    def _spoil(self, state, chosen):
        for number, (field, bad) in enumerate(BAD, 1):
            spoiled = jnp.where(chosen == number, jnp.float32(bad), getattr(state, field))
            state = replace(state, **{field: spoiled})
        return state


def test_a_law_that_sets_a_field_to_no_number_ends_its_own_sequence(six_slots):
    """A rule that spoils temperatures above 3, likewise; between them requests to which nothing happens."""

    def rule(moments_at, signals, state):
        worst = jnp.where(state.temperature < 3.1, jnp.nan, jnp.where(state.temperature < 3.3, -0.5, jnp.inf))
        bad = (signals.generated == 3) & (state.temperature > 2.9)
        return jnp.where(bad, worst, state.temperature)

    control = Controller(law=chain(Controller().law, Broken()), temperature_rule=rule)
    numbers = range(1, len(BAD) + 1)
    heats = [0.0, 1.0, *(1 + i / 64 for i in numbers), *(2 + i / 64 for i in numbers), 3.0, 3.2, 3.4, 0.0, 1.0]
    tokens = six_slots.tokenizer.encode(SENTENCE)
    requests = [
        requested(tuple(tokens[i % 5 : i % 5 + 7]), max_tokens=8, seed=i, temperature=heat)
        for i, heat in enumerate(heats)
    ]
    done, expected = six_slots.generate(requests, control=control), six_slots.generate(requests)
    assert six_slots.metrics.programs_compiled_late == 0  # a control for one call is compiled before its first round
    for i, (one, other, heat) in enumerate(zip(done, expected, heats, strict=True)):
        case = 0 if heat > 2.9 else round(heat % 1 * 64)
        if heat > 2.9:
            assert "The temperature rule returned a value that is not a finite number" in str(one.error)
        elif 0 < case <= 9:
            assert f"The control law set {BAD[case - 1][0]} to a value that is not" in str(one.error), i
        else:
            assert one.error is None and len(one.token_ids) == 8
            assert case or bits(one) == bits(other)
            continue
        assert one.finish_reason == "error" and len(one.token_ids) == (0 if 2 < heat < 2.9 else 2)
        assert one.token_ids == other.token_ids[: len(one.token_ids)]


@pytest.mark.timeout(120)
def test_a_priority_of_no_number_ends_its_sequence_and_the_lowest_starves_none(six_slots):
    """Six are in slots and four advance: without care the two last would wait for ever."""

    def rule(signals, state):
        worst = jnp.where(state.temperature > 1.7, jnp.nan, -jnp.inf)
        return jnp.where(state.temperature > 1.2, worst, -signals.arrival.astype(jnp.float32))

    requests = [
        replace(one, params=replace(one.params, temperature=heat))
        for one, heat in zip(asked(six_slots.tokenizer, 6, longer=5), (1.0, 1.0, 1.0, 1.0, 1.5, 2.0), strict=True)
    ]
    done, expected = six_slots.generate(requests, control=Controller(priority=rule)), six_slots.generate(requests)
    assert [bits(one) for one in done[:5]] == [bits(one) for one in expected[:5]]
    assert "The priority rule returned a value that is not a number" in str(done[5].error)
