"""A controller as a notebook shows it: every part that decides, with its numbers."""

import re

import jax
import pytest

from et_jax.control.controller import Controller
from et_jax.control.presets import NAMES, preset
from et_jax.control.select import Dense
from et_jax.control.temperature import Thermostat


def cells(controller: Controller) -> list[list[str]]:
    """The rows of the table, as texts."""
    drawn = controller._repr_html_()
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", drawn)][1:]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_preset_is_shown(name: str):
    controller = preset(name)
    shown = " ".join(part for row in cells(controller) for part in row)
    for path, leaf in jax.tree.leaves_with_path(controller):
        key, told = path[-1].name, re.escape(f"{leaf:.4g}" if isinstance(leaf, float) else f"{leaf}")
        if key not in ("deadband", "weight", "prior_variance"):  # worked out of the others
            assert re.search(rf"\b{key} {told}(,| |$)", shown), (key, leaf)


def test_what_stands_within_another_is_set_in_below_it():
    rows = [row[1:] for row in cells(preset("paper"))]
    [at] = [i for i, row in enumerate(rows) if row[0] == "RateLimited"]
    assert rows[at : at + 3] == [
        ["RateLimited", "field tolerance, rise 0.0125, fall inf"],
        ["\xa0" * 4 + "Floored", "floor 0.1"],
        ["\xa0" * 8 + "EntropyThreshold", "greatest 0.05, reference_entropy 2"],
    ]


def warm(signals, state):
    return state


def test_plain_functions_are_shown_by_name_and_layers_in_order():
    rows = cells(Controller(law=warm, selector=(Dense(), lambda view: view.start % 2 == 0)))
    assert ["law", "warm", ""] in rows
    at = [row[0] for row in rows].index("selector")
    assert [row[1].strip("\xa0") for row in rows[at : at + 2]] == ["Dense", "MaskSelector"]


def test_numbers_that_are_being_traced_are_shown_by_their_form():
    seen = []
    jax.jit(lambda controller: seen.append(cells(controller)))(Controller(law=Thermostat(2.0)))
    [rows] = seen
    assert ["law", "Thermostat", ", ".join(f"{n} float32[]" for n in ("target_entropy", "gain", "low", "high"))] in rows
