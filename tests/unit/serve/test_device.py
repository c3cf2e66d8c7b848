"""Which program a device decodes with: one without drafts while what drafts is made, one that chooses where asked."""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import configuration, weights

from et_jax.control.draft import FixedLength, started
from et_jax.control.presets import preset
from et_jax.decode.decoder import Program, decoder
from et_jax.decode.draft import Drafting, Pruned
from et_jax.decode.output import StepOutput
from et_jax.decode.state import empty
from et_jax.serve.device import Device
from et_jax.serve.executables import Kept
from et_jax.types import replace


class Told(Kept):
    """A program with an output of its own, which is made once `go` is set, or cannot be."""

    def __init__(self, name: str, go: threading.Event, failure: Exception | None = None) -> None:
        super().__init__(Program(jax.jit(lambda: None)), name, "")
        self.name, self.go, self.failure, self.num_made = name, go, failure, 0
        self.output = object.__new__(StepOutput)

    def __call__(self, weights: Any, state: Any, num_steps: Any, until_end: Any) -> Any:
        return state, self.output, jnp.int32(num_steps)

    def is_kept(self, *arguments: Any) -> bool:
        return True

    def ahead(self, *arguments: Any) -> Any:
        def make() -> None:
            assert self.go.wait(60)
            self.num_made += 1
            if self.failure is not None:
                raise self.failure

        return make


def warmed_up(go: threading.Event, drafts: bool, failure: Exception | None = None, **settings: Any) -> Device:
    """A device of which everything but `decode` does nothing."""
    bound = decoder(configuration(**settings))
    state = {"control": np.zeros(3)}

    def nothing(*_: Any) -> Any:
        return state, np.bool_(True)

    ready = threading.Event()
    ready.set()
    idle = {"prefill": nothing, "insert": lambda *_: state, "release": lambda *_: state, "empty": lambda: state}
    whole = bound.config.whole._replace(chooses=bound.config.may_choose(bound.config.controller))
    programs = {one: Told(str(one), ready) for one in bound.variants}
    programs |= {whole._replace(drafts=False): Told("plain", ready), whole: Told("drafting", go, failure)}
    device = Device((weights(),), replace(bound, variants=programs, **cast(Any, idle)))
    device.warm_up(lambda _: None, shares=False, swaps=False, drafts=drafts)
    return device


def ran(device: Device, may_choose: bool = True) -> str:
    """Decode, and return the name of the program that did."""
    output, _, variant = device.decode(3, 1, may_choose=may_choose, until_end=False)
    assert variant.rows == device.config.batch
    program = told(device.decoder.variants[variant])
    assert program.output is output
    return program.name


def told(program: Any) -> Told:
    assert isinstance(program, Told)
    return program


def test_steps_have_no_drafts_until_the_program_that_drafts_is_made():
    go = threading.Event()
    device = warmed_up(go, drafts=False, draft=Drafting())
    assert device.making and ran(device) == "plain"
    go.set()
    assert device._drafting is not None and device._drafting.result(60) is None
    assert not device.making and [ran(device) for _ in range(2)] == ["drafting"] * 2


def test_what_keeps_it_from_being_made_is_raised_once_it_is_wanted():
    go = threading.Event()
    device = warmed_up(go, drafts=False, failure=MemoryError("no room"), draft=Drafting())
    assert ran(device) == "plain"
    go.set()
    with pytest.raises(MemoryError, match="no room"):
        while ran(device) == "plain":
            pass


@pytest.mark.parametrize(
    "settings", [{"drafts": True, "draft": Drafting()}, {"drafts": False}], ids=["awaited", "none"]
)
def test_a_program_that_is_awaited_or_drafts_nothing_is_the_only_one(settings):
    go = threading.Event()
    go.set()
    device = warmed_up(go, **settings)
    assert not device.making and ran(device) == "drafting"
    made = {one.name: one.num_made for one in map(told, device.decoder.variants.values())}
    assert made == {"drafting": 1} | {name: 0 for name in made if name != "drafting"}


LENGTH = configuration().max_length


@pytest.mark.parametrize("draft", [None, Drafting()])
@pytest.mark.parametrize("least", [LENGTH + 1, LENGTH, 0])
def test_what_can_choose_blocks_is_not_made_before_a_sequence_may_be_long_enough(least, draft):
    go, never = threading.Event(), least > LENGTH
    go.set()
    device = warmed_up(go, drafts=True, draft=draft, controller=preset("certified", min_context=least))
    whole = device.config.whole
    made = [variant for variant, one in device.decoder.variants.items() if told(one).num_made]
    assert made == [whole._replace(chooses=not never)]
    assert ran(device, may_choose=False) == "drafting"  # what is made, for it does the same
    assert ran(device, may_choose=True) == (str(whole) if never else "drafting")


@pytest.mark.parametrize(
    ("active", "length", "program"),
    [
        ((True, True, True), (0, 0, 0), "plain"),
        ((True, True, True), (0, 3, 0), "drafting"),
        ((True, False, True), (0, 3, 0), "plain"),
    ],
)
def test_a_model_that_drafts_for_itself_runs_the_program_that_can_where_a_draft_is_wanted(active, length, program):
    go = threading.Event()
    go.set()
    device = warmed_up(go, drafts=True, draft=Drafting(drafter=Pruned()))
    draft = replace(started(FixedLength(), jnp.full(3, 8, jnp.int32)), length=jnp.asarray(length, jnp.int32))
    state = replace(empty(device.config), active=jnp.asarray(active))
    for law in (draft, replace(draft, length=0 * draft.length, before=draft)):
        device.state = replace(state, draft=law)
        assert ran(device) == program
