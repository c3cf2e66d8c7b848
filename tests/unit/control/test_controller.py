"""A controller: what it refuses, and its table in a notebook, of every part that decides with its numbers."""

import re

import jax
import pytest

from et_jax.control.budget import ConstantBudget
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.select import Dense
from et_jax.control.temperature import Thermostat


def cells(controller: Controller) -> list[list[str]]:
    """The rows of the table, as texts."""
    drawn = controller._repr_html_()
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", drawn)][1:]


def warm(signals, state):
    return state


def test_parts_are_shown_below_those_that_contain_them_functions_by_name_and_traced_numbers_by_their_form():
    rows = [row[1:] for row in cells(preset("paper"))]
    [at] = [i for i, row in enumerate(rows) if row[0] == "RateLimited"]
    assert rows[at : at + 3] == [
        ["RateLimited", "field tolerance, rise 0.0125, fall inf"],
        ["\xa0" * 4 + "Floored", "floor 0.1"],
        ["\xa0" * 8 + "EntropyThreshold", "greatest 0.05, reference_entropy 2"],
    ]
    rows = cells(Controller(law=warm, selector=(Dense(), lambda view: view.start % 2 == 0)))
    assert ["law", "warm", ""] in rows
    at = [row[0] for row in rows].index("selector")
    assert [row[1].strip("\xa0") for row in rows[at : at + 2]] == ["Dense", "MaskSelector"]
    seen = []
    jax.jit(lambda controller: seen.append(cells(controller)))(Controller(law=Thermostat(2.0)))
    numbers = ", ".join(f"{n} float32[]" for n in ("target_entropy", "gain", "low", "high"))
    assert ["law", "Thermostat", numbers] in seen[0]


@pytest.mark.usefixtures("as_users_have_it")
def test_controllers_are_told_by_their_values_and_refuse_what_they_cannot_use():
    one, other = (Controller(law=Thermostat(2.0)) for _ in range(2))
    assert len({one, other}) == 1 and one != Controller(law=Thermostat(2.5))
    assert Controller(min_context=0) == Controller()
    assert Controller(budget=ConstantBudget()).budget == ConstantBudget()
    for changes, sentence in (
        ({"min_context": -1}, "min_context: got -1, wanted 0"),
        ({"budget": 5}, "budget: got int, wanted a Budget or None"),
        ({"refresh_every": 0}, "refresh_every: got 0, wanted at least 1"),
        ({"residual": True, "refresh_every": 2}, "residual: unread blocks are weighed by this token's query"),
        ({"selector": 3}, "selector: got int, wanted a selector, a function, or a tuple of them"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Controller(**changes)
