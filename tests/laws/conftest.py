"""One tiny model and one decoder for each row of the table, shared by all laws."""

import functools

import jax
import pytest
from capabilities import CAPABILITIES, OVER_DEVICES, SLOW
from hurry import hurried
from served import Served


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_end_with_their_module():
    """Programs stay, for the next law asks for them again."""


@pytest.fixture(autouse=True)
def _compiled_in_a_hurry():
    with hurried():
        yield


ROWS = CAPABILITIES | OVER_DEVICES


def _param(name: str):
    """A row, with the marks of the runs that try it."""
    marks = [pytest.mark.slow] * (name in SLOW) + [pytest.mark.devices] * (name in OVER_DEVICES)
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="session", params=map(_param, ROWS))
def served(request):
    """Every capability in turn."""
    if request.param in OVER_DEVICES and jax.device_count() < 4:
        pytest.skip("needs the devices that -m devices makes")
    return _made(request.param)


@functools.cache
def _made(name: str) -> Served:
    """A row, made once: between two laws pytest may ask for others."""
    with hurried():
        return Served(ROWS[name]())
