"""Which program a device decodes with: one without drafts while what drafts is made, one that chooses where asked."""

import threading
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from promised import Promised
from small_model import configuration, weights

from et_jax.control.draft import FixedLength, started
from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.decode.state import empty
from et_jax.serve.device import Device
from et_jax.types import replace


def warmed_up(
    go: threading.Event | None = None, drafts: bool = True, failure: Exception | None = None, **settings: Any
) -> Device:
    """A device of which everything but `decode` does nothing."""
    bound = decoder(configuration(**settings))
    state = {"control": np.zeros(3)}

    def nothing(*_: Any) -> Any:
        return state, np.bool_(True)

    ready = threading.Event()
    ready.set()
    go = ready if go is None else go
    idle = {"prefill": nothing, "insert": lambda *_: state, "release": lambda *_: state, "empty": lambda: state}
    whole = bound.config.full_variant._replace(chooses=bound.config.may_choose(bound.config.controller))
    programs = {one: Promised(str(one), go=ready) for one in bound.variants}
    programs |= {
        whole._replace(drafts=False): Promised("plain", go=ready),
        whole: Promised("drafting", go=go, failure=failure),
    }
    device = Device((weights(),), replace(bound, variants=programs, **cast(Any, idle)))
    device.warm_up(lambda _: None, shares=False, swaps=False, drafts=drafts)
    return device


def ran(device: Device, may_choose: bool = True) -> str:
    """Decode, and return the name of the program that did."""
    output, variant = device.decode(3, 1, may_choose=may_choose, until_end=False)
    assert variant.rows == device.config.batch
    program = device.decoder.variants[variant]
    assert isinstance(program, Promised)
    assert program.output is output
    return program.name


def num_made(device: Device) -> dict[str, int]:
    return {one.name: one.num_made for one in device.decoder.variants.values() if isinstance(one, Promised)}


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


@pytest.mark.parametrize("settings", [{"drafts": True, "draft": Drafting()}, {"drafts": False}])
def test_a_program_that_is_awaited_or_drafts_nothing_is_the_only_one(settings):
    device = warmed_up(**settings)
    assert not device.making and ran(device) == "drafting"
    assert num_made(device) == dict.fromkeys(num_made(device), 0) | {"drafting": 1}


LENGTH = configuration().max_length


@pytest.mark.parametrize("draft", [None, Drafting()])
@pytest.mark.parametrize("least", [LENGTH + 1, LENGTH, 0])
def test_what_can_choose_blocks_is_not_made_before_a_sequence_may_be_long_enough(least, draft):
    never = least > LENGTH
    device = warmed_up(draft=draft, controller=preset("certified", min_context=least))
    whole = device.config.full_variant
    assert num_made(device) == dict.fromkeys(num_made(device), 0) | {"drafting": 1}
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
    device = warmed_up(draft=Drafting(drafter=Pruned()))
    draft = replace(started(FixedLength(), jnp.full(3, 8, jnp.int32)), length=jnp.asarray(length, jnp.int32))
    state = replace(empty(device.config), active=jnp.asarray(active))
    for law in (draft, replace(draft, length=0 * draft.length, before=draft)):
        device.state = replace(state, draft=law)
        assert ran(device) == program
