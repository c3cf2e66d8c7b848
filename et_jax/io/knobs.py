"""Knobs: settings that are fields of a dataclass, each with its meaning and its valid numbers.

Commands list them as flags, and the constructor of such a dataclass checks their values.
"""

import dataclasses
import math
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.values import integer, number, plain, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """The meaning of a field: `help` in a line, its `unit`, and its valid numbers from `least` to `most`.

    Integers if `kind` is int. `wanted` describes valid numbers in messages. Infinity is valid
    only if the knob may be `infinite`. `usual` describes the default in words if commands compute it.
    """

    help: str
    unit: str
    wanted: str
    kind: type[int] | type[float]
    least: float | int = -math.inf
    most: float | int = math.inf
    infinite: bool = False
    usual: str = ""

    def checked(self, name: str, value: Any) -> int | float:
        """Return a value of the field `name` as a plain number. Raises UsageError if it is not one, or out of range."""
        if self.infinite and plain(value) in (math.inf, -math.inf):
            return float(value)
        taken = integer(name, value) if self.kind is int else number(name, value)
        if not self.least <= taken <= self.most:
            raise UsageError(f"{name} is {shown(taken)}; it must be {self.wanted}.")
        return taken


def knob(default: float | int | None, about: Knob) -> Any:
    """Return a field that is a knob. A default of None means that nothing is set."""
    return dataclasses.field(default=default, metadata={"knob": about})


def knobs(owner: Any) -> dict[str, Knob]:
    """Return the knobs of a dataclass, or of a value of one, by name."""
    fields = dataclasses.fields(owner)
    return {field.name: field.metadata["knob"] for field in fields if "knob" in field.metadata}


def defaults(owner: Any) -> dict[str, Any]:
    """Return the default values of a dataclass's knobs, by name; None means off."""
    return {field.name: field.default for field in dataclasses.fields(owner) if "knob" in field.metadata}
