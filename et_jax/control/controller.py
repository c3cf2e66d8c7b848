"""All laws, selectors and the scheduling priority of a decoder as one value."""

import dataclasses
from typing import Any, ClassVar

from et_jax.control.base import (
    AnyLaw,
    Chain,
    Function,
    PriorityRule,
    TemperatureRule,
    as_value,
    chain,
    described,
    name_of,
)
from et_jax.control.budget import Budget
from et_jax.control.clock import FallClock
from et_jax.control.entropy import Estimator, ExactEstimator
from et_jax.control.experts import ExpertRule
from et_jax.control.priority import FCFS
from et_jax.control.select import Dense
from et_jax.control.selector import AnySelector, Selector, as_selector
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.switch import Switch, SwitchState
from et_jax.io import html
from et_jax.types import MaybeCount, replace, static, value


@value
class Controller:
    """Laws, rules, selectors and the scheduling priority: everything that controls the decoder beside the model.

    `estimator` measures the raw entropy. `law` runs after every token. `temperature_rule` sets the
    temperature of the token about to be sampled; None leaves it to the law. `priority` orders the
    sequences if more are resident than fit into a step.

    `selector` is one for all layers, or one per layer; the first `dense_layers` layers use full attention
    regardless. `experts` sets how many experts of a mixture a decoded token is routed to; None is as many as trained.
    With `residual`, blocks left unread count as their mean value. A sequence of fewer than `min_context` tokens uses
    full attention, and no block is scored for it; 0 is None, off. `switch` chooses between two models. `budget` selects
    the blocks that prompt segments read; without one they use full attention.

    Controllers with equal `jax.tree.structure` differ only in numbers: one program runs them for
    different sequences of one batch. Plain functions are accepted everywhere, and equal only themselves.

    `preset` is the `presets.Preset` that made this value; None if it was built by hand or changed since. It is not part
    of the tree.
    """

    preset: ClassVar[Any] = None
    _: dataclasses.KW_ONLY
    estimator: Estimator = ExactEstimator()
    law: AnyLaw = chain(EmaEntropy(), FallClock())
    temperature_rule: TemperatureRule | None = None
    selector: AnySelector | tuple[AnySelector, ...] = Dense()
    experts: ExpertRule | None = None
    priority: PriorityRule = FCFS()
    switch: Switch | None = None
    budget: Budget | None = None
    min_context: MaybeCount = None
    dense_layers: int = static(default=0)
    residual: bool = static(default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget | None):
            raise ValueError(f"budget: got {described(self.budget)}, wanted a Budget or None")
        if isinstance(self.min_context, int) and self.min_context < 1:
            if self.min_context < 0:
                raise ValueError(f"min_context: got {self.min_context}, wanted 0 (off) or above")
            object.__setattr__(self, "min_context", None)  # a disabled option adds nothing to the program
        several = isinstance(self.selector, tuple)
        made = {
            "estimator": as_value(self.estimator),
            "law": chain(self.law),
            "temperature_rule": None if self.temperature_rule is None else as_value(self.temperature_rule),
            "selector": tuple(map(as_selector, self.selector)) if several else as_selector(self.selector),
            "priority": as_value(self.priority),
        }
        for name, one in made.items():
            object.__setattr__(self, name, one)

    def selectors(self, num_layers: int) -> tuple[Selector, ...]:
        """Return the selector of every layer."""
        each = self.selector if isinstance(self.selector, tuple) else (self.selector,) * num_layers
        return tuple(Dense() if i < self.dense_layers else as_selector(one) for i, one in enumerate(each))

    def with_experts(self, rule: ExpertRule | None) -> "Controller":
        """Return the controller with another expert rule; the knobs of its preset stay known."""
        made = replace(self, experts=rule)
        if self.preset is not None:
            object.__setattr__(made, "preset", self.preset)
        return made

    def switch_started(self) -> SwitchState | None:
        """Return the initial switch state of one sequence; None without a second model."""
        return None if self.switch is None else self.switch.started()

    def _repr_html_(self) -> str:
        """Return a table of the parts, each with its numbers; nested parts are indented."""
        rows = []
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            members = part.laws if isinstance(part, Chain) else part if isinstance(part, tuple) else (part,)
            rows += [row for i, one in enumerate(members) for row in _rows(one, "" if i else field.name)]
        return html.boxed(html.table(["part", "what", "numbers"], rows))


def _rows(part: Any, name: str, depth: int = 0) -> list[list[str]]:
    """Return the row of a part, and the rows of its nested parts."""
    plain = isinstance(part, Function) or not dataclasses.is_dataclass(part)
    fields = (
        [] if plain else [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part) if field.repr]
    )
    inner = [(key, one) for key, one in fields if dataclasses.is_dataclass(one)]
    numbers = ", ".join(f"{key} {_shown(one)}" for key, one in fields if not dataclasses.is_dataclass(one))
    rows = [[name, _IN * depth + _shown(part), numbers]]
    return rows + [row for key, one in inner for row in _rows(one, "", depth + 1)]


_IN = "\N{NO-BREAK SPACE}" * 4  # indent of a nested part


def _shown(one: Any) -> str:
    """Return a number unchanged, arrays by shape and dtype, laws and functions by name."""
    if one is None or isinstance(one, bool | int | float | str):
        return html.shown(one)
    return name_of(one) if callable(one) or dataclasses.is_dataclass(one) else described(one)
