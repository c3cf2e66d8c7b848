"""The laws of each preset, built from its knobs."""

from collections.abc import Callable, Mapping

from et_jax.control import clock, guards, priority, select, temperature, temperature_rules
from et_jax.control import tolerance as tolerances
from et_jax.control.base import Law, PriorityRule, chain
from et_jax.control.budget import EntropyBudget
from et_jax.control.contribution import relative_influence
from et_jax.control.controller import Controller
from et_jax.control.entropy import TailCorrectedEstimator
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.selector import Selector
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.switch import AsPrinted, Hysteresis

_LOW, _HIGH = 0.1, 2.0  # the thermostat's range
_GAIN = 0.05  # stable for every distribution over 128k tokens: see temperature.Thermostat
_FLOOR, _REFERENCE = 0.1, 2.0  # nats: the entropies of full certainty and of full uncertainty
_MOST_TARGETS = 4.0  # the cap of Mirostat, in its targets
_LOOK_EVERY = 64  # one token in so many uses full attention


def paper(target_entropy: float | None, tolerance: float, min_blocks: int, window: int, min_context: int) -> Controller:
    """Return Entropic-Time Inference as printed."""
    active = select.ActiveSet(relative_influence, look_every=_LOOK_EVERY)
    return Controller(
        estimator=TailCorrectedEstimator(),
        law=_chained(*_thermostat(target_entropy), _threshold(tolerance)),
        selector=select.Guarded(active, sinks=0, window=window, min_blocks=min_blocks),
        priority=priority.LinearPriority(),
        min_context=min_context,
    )


def guarded(
    target_entropy: float | None, tolerance: float, min_blocks: int, window: int, min_context: int
) -> Controller:
    """Return the same laws with exact entropy, sinks, and a temperature that only cools."""
    active = select.ActiveSet(relative_influence, look_every=_LOOK_EVERY)
    return Controller(
        law=_chained(*_cooling(target_entropy), _threshold(tolerance)),
        selector=select.Guarded(active, window=window, min_blocks=min_blocks),
        priority=_aged(),
        min_context=min_context,
    )


def certified(
    target_entropy: float | None, tolerance: float, min_blocks: int, window: int, min_context: int
) -> Controller:
    """Return the laws that read all but a proved share of each head's attention mass."""
    proved = select.PerHead(select.Certified(select.coded_bounds), AttentionEntropy())
    return _at_constant(proved, target_entropy, tolerance, min_blocks, window, min_context, residual=True)


def adaptive(
    target_entropy: float | None, tolerance: float, min_blocks: int, window: int, min_context: int
) -> Controller:
    """Return the laws that read the blocks of greatest expected error."""
    return _at_constant(ExpectedError(), target_entropy, tolerance, min_blocks, window, min_context, residual=True)


def share(target_entropy: float | None, tolerance: float, min_blocks: int, window: int, min_context: int) -> Controller:
    """Return the laws that read a fixed share of the blocks. The others count as nothing."""
    selector = select.TopBlocks(min_blocks=min_blocks)
    return _at_constant(selector, target_entropy, tolerance, 0, window, min_context, residual=False)


def ead(tau: float) -> Controller:
    """Return Entropy Adaptive Decoding as printed."""
    return Controller(switch=AsPrinted(tau))


def ead_guarded(tau: float) -> Controller:
    """Return the same switch with hysteresis."""
    return Controller(switch=Hysteresis(tau))


def entropyinfer(prefill_budget: int) -> Controller:
    """Return the prefill budget, in segments of a quarter of it."""
    segment = max(1, min(EntropyBudget.segment, prefill_budget // 4))
    return Controller(budget=EntropyBudget(tokens=prefill_budget, segment=segment, dense_until=2 * prefill_budget))


def mirostat(target_surprisal: float, mirostat_rate: float) -> Controller:
    """Return Mirostat's second version, its cap at least the target."""
    law = temperature.Mirostat2(target_surprisal, mirostat_rate)
    capped = guards.Clipped(law, "surprisal_cap", target_surprisal, _MOST_TARGETS * target_surprisal)
    return Controller(law=chain(Controller.law, capped))


def dynamic(dynamic_spread: float, dynamic_exponent: float) -> Controller:
    """Return the temperature that grows with the entropy of the very token."""
    return Controller(temperature_rule=temperature_rules.Dynamic(dynamic_spread, dynamic_exponent))


LAWS: Mapping[str, Callable[..., Controller]] = {
    "off": Controller,
    "paper": paper,
    "guarded": guarded,
    "certified": certified,
    "adaptive": adaptive,
    "share": share,
    "ead": ead,
    "ead_guarded": ead_guarded,
    "entropyinfer": entropyinfer,
    "mirostat": mirostat,
    "dynamic": dynamic,
}
"""The function that builds each preset's controller, from its knobs by name."""


def _at_constant(
    selector: Selector,
    target_entropy: float | None,
    tolerance: float,
    min_blocks: int,
    window: int,
    min_context: int,
    *,
    residual: bool,
) -> Controller:
    """Return the laws of a selector at a constant tolerance; with `residual` unread blocks count as their mean."""
    return Controller(
        law=_chained(*_cooling(target_entropy), tolerances.Constant(tolerance)),
        selector=select.Guarded(selector, window=window, min_blocks=min_blocks),
        priority=_aged(),
        min_context=min_context,
        residual=residual,
    )


def _chained(*laws: Law) -> Law:
    return chain(EmaEntropy(), clock.FallClock(), *laws, priority.EntropyDrift())


def _thermostat(target_entropy: float | None) -> tuple[Law, ...]:
    if target_entropy is None:
        return ()
    law = guards.RateLimited(temperature.Thermostat(target_entropy, _GAIN, _LOW, _HIGH), "temperature", 0.1, 0.1)
    return (guards.Stability(guards.Saturation(law, "temperature", _LOW, _HIGH), _GAIN),)


def _cooling(target_entropy: float | None) -> tuple[Law, ...]:
    return tuple(guards.NeverAboveStart(law, "temperature") for law in _thermostat(target_entropy))


def _threshold(greatest: float) -> Law:
    floored = guards.Floored(tolerances.EntropyThreshold(greatest, _REFERENCE), _FLOOR)
    return guards.RateLimited(floored, "tolerance", rise=0.25 * greatest)


def _aged() -> PriorityRule:
    return priority.Aged(priority.LinearPriority(), ceiling=2.0, rate=0.05)
