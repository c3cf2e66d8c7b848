"""Changes to the numbers of a controller by name, which a request may make without recompiling."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from et_jax.control.controller import Controller
from et_jax.control.presets import KNOBS, preset
from et_jax.errors import UsageError
from et_jax.io.values import shown


def adjusted(controller: Controller, changes: Mapping[str, int | float]) -> Controller:
    """Return the controller with some numbers changed by name, for the same compiled program.

    A preset accepts its knobs, with the same checks. Any controller accepts the numeric fields of its laws, rules and
    selectors; all fields of one name change together.

    Raises UsageError for a name that the controller does not have, an invalid value, and a change
    that requires another program, such as a thermostat where there is none.
    """
    names = sorted(_names(controller) | set(() if controller.preset is None else KNOBS))
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
            f"control sets {', '.join(changes)}, which requires another compiled program than the loaded one; "
            "load the model with such a control, and requests may change its numbers."
        )
    return changed


def _changed(controller: Controller, changes: Mapping[str, int | float]) -> Controller:
    changed, made, rest = controller, controller.preset, dict(changes)
    if made is not None:
        given = {name: rest.pop(name) for name in KNOBS if name in rest}
        changed = preset(made.name, **vars(made) | given).with_experts(controller.experts) if given else controller
    for name, number in rest.items():
        changed = _with(changed, name, number)
    return changed


def _values(tree: Any) -> Iterator[Any]:
    """Yield every dataclass and tuple member in the tree, the root included."""
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
    """Return the names of all numbers that may be set."""
    each = ((field, getattr(one, field.name)) for one in _values(tree) for field in dataclasses.fields(one))
    return {field.name for field, given in each if _is_number(field, given)}


def _with(tree: Any, name: str, given: int | float) -> Any:
    """Return the tree with every number of that name changed; derived fields are computed again."""
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
