"""What every law is made of: chains, checked changes of the state, what a selector returns, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from drawn_blocks import blocks

from et_jax.control import refresh, select
from et_jax.control.base import Chain, ControlState, Law, Signals, chain, one_like, started, updated, with_record
from et_jax.control.budget import ConstantBudget, MassBudget
from et_jax.control.clock import FallClock, RecordClock
from et_jax.control.compression import Compression
from et_jax.control.contribution import token_nll
from et_jax.control.expected_error import ExpectedError
from et_jax.control.guards import Saturation
from et_jax.control.priority import EntropyDrift
from et_jax.control.selector import MaskSelector
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.temperature import Fixed, Thermostat
from et_jax.control.view import mass
from et_jax.types import Number, replace, value


@value
class Doubles(Law):
    """A user's own law with a number, which it adds to twice the temperature."""

    added: Number = 1.0

    def init(self, state: ControlState) -> ControlState:
        return replace(state, temperature=2.0 * state.temperature + self.added)

    def __call__(self, _: Signals, state: ControlState) -> ControlState:
        return self.init(state)


def test_a_chain_starts_and_runs_its_laws_in_order_each_from_the_state_of_the_one_before(signals, state):
    law = Chain((Doubles(1), Chain((Doubles(2), Doubles(4)))))
    start = state(law)
    assert float(start.temperature) == 2 * (2 * (2 * 1 + 1) + 2) + 4 == 20
    assert float(law(signals(entropy=0.0), start).temperature) == 2 * (2 * (2 * 20 + 1) + 2) + 4
    assert chain(EmaEntropy(), chain(Fixed(), FallClock())) == chain(chain(EmaEntropy(), Fixed()), FallClock())
    plain = chain(lambda signals, state: replace(state, tolerance=signals.entropy))
    assert plain.init(start) is start  # a plain function has nothing to start
    assert chain().init(start) is start and chain()(signals(entropy=0.0), start) is start


def three(signals: Signals, state: ControlState) -> ControlState:
    return replace(state, temperature=jnp.zeros(3))


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("law", "sentence"),
    [
        (three, "The law three sets temperature to float32[3]; it must be float32[]."),
        (lambda signals, state: replace(state, wait=signals.entropy), "sets wait to float32[]; it must be int32[]."),
        (lambda signals, state: replace(state, tolerance="much"), "sets tolerance to str; it must be float32[]."),
        (lambda signals, state: signals.entropy, "must return the ControlState it received, with fields changed"),
        (
            lambda signals, state: with_record(state, "mine", signals.entropy),
            "leaves records of {['mine'] float32[]}, wanted {}",
        ),
    ],
)
def test_a_law_that_returns_another_form_is_refused_by_name(signals, state, law, sentence):
    with pytest.raises(ValueError) as refused:
        updated(chain(law), signals(entropy=0.0), state())
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.usefixtures("as_users_have_it")
def test_a_python_number_stands_for_an_array_of_the_fields_dtype(signals, state):
    law = chain(lambda signals, state: replace(state, temperature=1, wait=2))
    after = updated(law, signals(entropy=0.0), state())
    assert (after.temperature.dtype, after.wait.dtype) == (jnp.float32, jnp.int32)
    assert (float(after.temperature), int(after.wait)) == (1.0, 2)
    assert one_like(jnp.zeros(2), 1, "").tolist() == one_like(jnp.zeros(2), np.float64(1), "").tolist() == [1.0, 1.0]
    for wanted, number in ((jnp.zeros(2, jnp.int32), 1.5), (jnp.zeros(2, bool), 1), (jnp.zeros(2), True)):
        with pytest.raises(ValueError, match=r"^It gives (float|int|bool); it must be [a-z0-9]+\[2\]\.$"):
            one_like(wanted, number, "It gives")


@pytest.mark.parametrize(
    "law",
    [
        chain(FallClock(), RecordClock()),
        Saturation(Saturation(Thermostat(1.0), "temperature", 0.1, 2.0), "temperature", 0.5, 1.0),
        chain(EntropyDrift(), EntropyDrift(0.5)),
    ],
)
def test_a_second_claim_to_a_note_is_refused(state, law):
    with pytest.raises(ValueError, match="which another law of the chain already claims; remove one of them"):
        started(law, state())


VIEW = blocks(0).view


def one_number(view):
    return view.tolerance


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ConstantBudget(tokens=0), "tokens is 0; it must be at least 1"),
        (lambda: MassBudget(left=1.0), "left is 1.0; it must be from 0 to below 1"),
        (lambda: Compression(budget=32), "budget: got 32, wanted "),
        (lambda: Compression(budget=42).layout(4, (None,)), "budget: got 42, wanted "),
        (lambda: select.ActiveSet(look_every=0), "look_every is 0; it must be at least 1, or None"),
        (lambda: refresh.Every(0), "num_tokens is 0; it must be at least 1"),
        (lambda: refresh.EntropicTime(0.0), "step is 0; it must be above 0 nats"),
        (lambda: refresh.EntropicTime(1.0, 0), "most_tokens is 0; it must be at least 1"),
        (lambda: select.PerHead(select.TopMass(), one_number)(VIEW), "The rule .*one_number.* returns"),
        (lambda: MaskSelector(lambda _: True)(VIEW), r"lambda.* returns bool; it must be bool\[10\]\.$"),
        (lambda: MaskSelector(lambda _: None)(VIEW), r"returns None; it must be bool\[10\]\.$"),
        (lambda: MaskSelector(lambda _: ())(VIEW), r"returns {}; it must be bool\[10\]\.$"),
        (lambda: MaskSelector(lambda view: view.start[:2] > 0)(VIEW), r"returns bool\[2\]; it must be bool\[10\]\.$"),
        (lambda: MaskSelector(lambda view: view.start)(VIEW), r"returns int32\[10\]; it must be bool\[10\]\.$"),
        (lambda: select.coded_bounds(VIEW), "no key codes"),
        (lambda: token_nll(VIEW, mass(VIEW)), "no surprisals"),
        (lambda: ExpectedError()(VIEW), "no key codes, or no sensitivity"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_made_in_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        make()
    assert "\n" not in str(refused.value)
