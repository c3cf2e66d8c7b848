"""What the reference shows of values, pytrees and docstrings: what Python itself makes of them."""

import inspect

import pytest
from site_here import ROOT, builder

from et_jax.control import clock, select, temperature
from et_jax.control.base import Signals
from et_jax.softmax import Softmax


@pytest.fixture(scope="module")
def package():
    """Return the package as the reference reads it."""
    habits = builder("habits")
    griffe = pytest.importorskip("griffe")
    return griffe.load("et_jax", search_paths=[ROOT], extensions=griffe.load_extensions("dataclasses", habits.Habits))


@pytest.mark.parametrize(
    "made",
    [clock.FallClock, clock.ChainRuleClock, clock.Beside, temperature.Thermostat, select.SinksWindow, Signals, Softmax],
)
def test_a_signature_is_the_one_that_python_makes(package, made):
    told = package[f"{made.__module__.removeprefix('et_jax.')}.{made.__name__}"].parameters
    own = inspect.signature(made).parameters
    assert [each.name for each in told] == ["self", *own]
    for name, parameter in own.items():
        assert told[name].required == (parameter.default is parameter.empty)
        assert told[name].kind.name.upper() == parameter.kind.name


def test_other_prose_stays_as_it_is():
    listed = builder("habits").listed
    prose = "Return it.\n\nof which\nraw: of the model's own.\n\nNote: no parameter."
    assert listed(prose, {"raw", "scale"}) == prose
