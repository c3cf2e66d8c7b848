"""Numbers of a controller changed by name: what a request may set for itself, in the program that runs."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from et_jax.control import presets, select, temperature, tolerance
from et_jax.control.budget import EntropyBudget
from et_jax.control.controller import Controller
from et_jax.errors import UsageError
from et_jax.io.values import shown


def adjusted(controller: Controller, changes: Mapping[str, int | float]) -> Controller:
    """Return the controller with some of its numbers changed by name, to run in the same program.

    Of a preset these are the settings of `presets.preset`, checked as there. Of any controller they are the
    numbers of its laws, rules and selectors by the names of their fields; all of one name change together.

    Raises UsageError for a name that the controller does not have, a value that does not fit, and a change
    that takes another program, such as a thermostat where there is none.
    """
    names = sorted(_names(controller) | set(presets.SETTINGS if preset_of(controller) else ()))
    for name in changes:
        if name not in names:
            raise UsageError(f"control has no number {shown(name)} here; it has {', '.join(names) or 'none'}.")
    try:
        changed = _changed(controller, changes)
    except UsageError:
        raise
    except (ValueError, ArithmeticError) as error:
        raise UsageError(f"control does not fit ({error}); choose other numbers.") from error
    if jax.tree.structure(changed) != jax.tree.structure(controller):
        raise UsageError(
            f"control sets {', '.join(changes)}, which takes another program than the one loaded; "
            "load the model with such a control, and requests may change its numbers."
        )
    return changed


def _changed(controller: Controller, changes: Mapping[str, int | float]) -> Controller:
    changed, rest = controller, dict(changes)
    found = preset_of(controller)
    if found is not None:
        name, settings = found
        for setting in presets.SETTINGS:
            if setting in rest:
                settings[setting] = presets.checked(name, setting, rest.pop(setting))
        changed = presets.preset(name, **settings)
    for name, given in rest.items():
        changed = _with(changed, name, given)
    return changed


def preset_of(controller: Controller) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the preset that a controller is, and its settings; None where it is none."""
    read = {
        "target_entropy": _first(controller, temperature.Thermostat, "target_entropy"),
        "tolerance": _first(controller, tolerance.Constant, "tolerance"),
        "min_blocks": _first(controller, select.Guarded, "min_blocks") or 0,
        "window": _first(controller, select.Guarded, "window"),
        "tau": None if controller.switch is None else _first(controller, type(controller.switch), "tau"),
        "prefill_budget": None if controller.budget is None else _first(controller, EntropyBudget, "tokens"),
    }
    if read["tolerance"] is None:
        read["tolerance"] = _first(controller, tolerance.EntropyThreshold, "greatest")
    known = {key: given for key, given in read.items() if given is not None}
    for name in presets.NAMES:
        settings = {knob: known[knob] for knob in presets.knobs_of(name) if knob in known}
        with contextlib.suppress(UsageError):
            if presets.preset(name, **settings) == controller:
                return name, settings
    return None


def _first(tree: Any, kind: type, field: str) -> Any:
    """The field of the first value of a kind in the tree, None where there is none."""
    return next((getattr(one, field) for one in _values(tree) if isinstance(one, kind)), None)


def _values(tree: Any) -> Iterator[Any]:
    """Yield every value in the tree, itself included."""
    if isinstance(tree, tuple):
        for one in tree:
            yield from _values(one)
    elif dataclasses.is_dataclass(tree):
        yield tree
        for field in dataclasses.fields(tree):
            yield from _values(getattr(tree, field.name))


def _is_number(field: dataclasses.Field, given: Any) -> bool:
    return field.init and not field.metadata.get("static") and isinstance(given, int | float)


def _names(tree: Any) -> set[str]:
    """The names of all numbers that may be set."""
    each = ((field, getattr(one, field.name)) for one in _values(tree) for field in dataclasses.fields(one))
    return {field.name for field, given in each if _is_number(field, given)}


def _with(tree: Any, name: str, given: int | float) -> Any:
    """The tree with every number of that name changed; what is worked out of it is worked out again."""
    if isinstance(tree, tuple):
        return tuple(_with(one, name, given) for one in tree)
    if not dataclasses.is_dataclass(tree):
        return tree
    changes = {}
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name)
        if field.name == name and _is_number(field, old):
            changes[name] = given
        elif field.init and not field.metadata.get("static"):
            changes[field.name] = _with(old, name, given)
    return dataclasses.replace(tree, **changes)
