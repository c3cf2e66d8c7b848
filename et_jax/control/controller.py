"""What runs the decoder beside the model: laws, selectors and the order of service as one value."""

import dataclasses

from et_jax.control.base import AnyLaw, PriorityRule, TemperatureRule, chain
from et_jax.control.clock import paper
from et_jax.control.entropy import Estimator, exact_estimator
from et_jax.control.priority import fcfs
from et_jax.control.select import AnySelector, dense
from et_jax.control.smoothing import ema_entropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
    """The three doors and the queue: what runs the decoder beside the model.

    `estimator` measures the raw entropy. `law` runs after every token. `temperature_rule` decides the
    temperature of the very token about to be drawn; None leaves it to the law. `priority` orders the
    sequences when more are resident than a step serves.

    `selector` is one for all layers, or one per layer; the first `dense_layers` layers read everything
    whatever it says. Blocks are chosen anew every `refresh_every` tokens. With `residual`, blocks left
    unread count as their mean value. The cache keeps 8-bit `key_codes` for `select.coded_bounds`, and
    `surprisals` of all tokens, the prompt's included, for `contribution.token_nll`.
    """

    estimator: Estimator = dataclasses.field(default_factory=exact_estimator)
    law: AnyLaw = dataclasses.field(default_factory=lambda: chain(ema_entropy(), paper()))
    temperature_rule: TemperatureRule | None = None
    selector: AnySelector | tuple[AnySelector, ...] = dataclasses.field(default_factory=dense)
    priority: PriorityRule = dataclasses.field(default_factory=fcfs)
    dense_layers: int = 0
    refresh_every: int = 1
    residual: bool = False
    key_codes: bool = False
    surprisals: bool = False

    def __post_init__(self) -> None:
        if self.refresh_every < 1:
            raise ValueError(f"refresh_every: got {self.refresh_every}, wanted at least 1")
        if self.residual and self.refresh_every > 1:
            raise ValueError("residual: unread blocks are weighed by this token's query; use it with refresh_every=1")
