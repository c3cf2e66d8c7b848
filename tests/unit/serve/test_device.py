"""What a device does while the program that drafts is made: it decodes without, and with it from then on."""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import configuration, weights

from et_jax.control.draft import FixedLength, started
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
    programs = {"decode": Told("drafting", go, failure), "decode_plain": Told("plain", ready)}
    device = Device((weights(),), replace(bound, **cast(Any, idle | programs)))
    device.warm_up(lambda _: None, shares=False, swaps=False, drafts=drafts)
    return device


def ran(device: Device) -> str:
    """Decode, and return the name of the program that did."""
    output, _, rows = device.decode(3, 1, until_end=False)
    assert rows == device.config.batch
    [name] = [
        one.name for one in map(told, (device.decoder.decode, device.decoder.decode_plain)) if one.output is output
    ]
    return name


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
    assert told(device.decoder.decode).num_made == 1 and told(device.decoder.decode_plain).num_made == 0


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
