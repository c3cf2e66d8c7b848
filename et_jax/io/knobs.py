"""Knobs: settings that are fields of a dataclass, each with what it means and which numbers it may be.

Commands list them as flags, and whoever makes such a dataclass has its values checked.
"""

import dataclasses
import math
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.values import number, plain, shown, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """What a field sets: `help` in a line, its `unit`, and the numbers from `least` to `most` that it may be.

    Whole numbers where `kind` is int. `wanted` says of a number in a sentence what it must be. Infinity is a number
    only where the knob may be `infinite`. `usual` says in words what stands for the default where commands work it out.
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
        """Return a value of the field `name` as a plain number. Raises UsageError where it is none, or out of range."""
        if self.infinite and plain(value) in (math.inf, -math.inf):
            return float(value)
        taken = whole(name, value) if self.kind is int else number(name, value)
        if not self.least <= taken <= self.most:
            raise UsageError(f"{name} is {shown(taken)}; it must be {self.wanted}.")
        return taken


def knob(default: float | int | None, about: Knob) -> Any:
    """Return a field that is a knob. A default of None says that nothing is set, and no number of the knob's."""
    return dataclasses.field(default=default, metadata={"knob": about})


def knobs(owner: Any) -> dict[str, Knob]:
    """Return the knobs of a dataclass, or of a value of one, by name."""
    fields = dataclasses.fields(owner)
    return {field.name: field.metadata["knob"] for field in fields if "knob" in field.metadata}


def defaults(owner: Any) -> dict[str, Any]:
    """Return where the knobs of a dataclass stand unless they are set, by name; None where that is off."""
    return {field.name: field.default for field in dataclasses.fields(owner) if "knob" in field.metadata}
