"""Controllers by name: what `--control` and `control="..."` mean."""

import math
from typing import Any

from et_jax.control import clock, guards, priority, select, temperature
from et_jax.control import tolerance as tolerances
from et_jax.control.base import Law, PriorityRule, chain
from et_jax.control.budget import EntropyBudget
from et_jax.control.contribution import relative_influence
from et_jax.control.controller import Controller
from et_jax.control.entropy import TailCorrectedEstimator
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.switch import AsPrinted, Hysteresis
from et_jax.errors import UsageError
from et_jax.io.values import number, plain, shown, whole

NAMES = ("off", "paper", "guarded", "certified", "adaptive", "ead", "ead_guarded", "entropyinfer")
_KNOBS = ("target_entropy", "tolerance", "min_blocks", "window")
SETTINGS = (*_KNOBS, "tau", "prefill_budget")
_COUNTED = ("min_blocks", "window", "prefill_budget")
_MOST = 2**29  # tokens or blocks: sums of a few stay within 32 bits
_SWITCHES = {"ead": AsPrinted, "ead_guarded": Hysteresis}
_BIT = math.log(2)
_LOW, _HIGH = 0.1, 2.0  # the thermostat's range
_GAIN = 0.05  # stable for every distribution over 128k tokens: see temperature.Thermostat
_FLOOR, _REFERENCE = 0.1, 2.0  # nats: entropies that count as certain and as uncertain
_LOOK_EVERY = 64  # tokens, of which one reads all


def preset(
    name: str,
    *,
    target_entropy: float | None = None,
    tolerance: float | None = None,
    min_blocks: int | None = None,
    window: int | None = None,
    tau: float | None = None,
    prefill_budget: int | None = None,
) -> Controller:
    """Return the controller of that name.

    "off" measures and changes nothing. "paper" is Entropic-Time Inference as printed: tail-corrected
    entropy, blocks with E_b > theta, a floor on the entropy and on the number of blocks, limits on
    rates. "guarded" is the same with exact entropy, sinks and a recent window always read, and a
    temperature that only cools. "certified" reads all but a proved share of the attention mass of every
    head, from 8-bit copies of the keys, and lets the rest count as its mean value; the share is less for
    heads that look at few blocks, by the entropy of their attention. "adaptive" reads the blocks of greatest
    expected error, from the same copies and the model's measured sensitivity to each head, which
    `scripts/calibrate.py` measures, and lets the rest count as its mean value.

    "paper" and "guarded" score no keys: alpha of E_b is what a block had when it was last read, or what its box
    promises (`view.greater_mass`). `scripts/measure_pruning.py` says which answers that keeps.

    "ead" is Entropy Adaptive Decoding as printed: of two models the small one speaks while the mean entropy of
    the last five predictions is at most `tau`, in nats, by default the paper's 0.25 bits; "ead_guarded" is the same
    with hysteresis, windows of one model's entropies, and a change before the token rather than after it. Both need
    a small model, and have no other knob.

    "entropyinfer" reads prompts segment by segment, each KV head as many blocks as the entropy of its attention
    asks for, `prefill_budget` tokens to begin with, and decodes as "off" does. Segments have a quarter of that, 512
    tokens at most, and the first two budgets of a prompt are read densely, as in its code.

    `target_entropy` (nats) switches the thermostat on; without it the temperature is the request's.
    `tolerance` is what may be left unread: under "certified" a share of attention mass that no head passes,
    under "adaptive" an expected error, in nats a token to an order of magnitude; else theta where the model is
    certain, the relative change of a head's output that a block must promise to be read.
    `min_blocks` are read at least, and the last `window` tokens always.

    Raises UsageError for an unknown name, a value out of range, or a knob that the named one does not have.
    """
    knobs = {
        "target_entropy": target_entropy,
        "tolerance": tolerance,
        "min_blocks": min_blocks,
        "window": window,
        "tau": tau,
        "prefill_budget": prefill_budget,
    }
    given = _check(name, {knob: value for knob, value in knobs.items() if value is not None})
    if name == "off":
        return Controller()
    if name in _SWITCHES:
        return Controller(switch=_SWITCHES[name](given.get("tau", 0.25 * _BIT)))
    if name == "entropyinfer":
        return Controller(budget=_budget(given.get("prefill_budget", EntropyBudget.tokens)))
    return {"paper": _paper, "guarded": _guarded, "certified": _certified, "adaptive": _adaptive}[name](**given)


def knobs_of(name: str) -> tuple[str, ...]:
    """Return the settings that a preset has."""
    if name == "off":
        return ()
    if name == "entropyinfer":
        return ("prefill_budget",)
    return ("tau",) if name in _SWITCHES else _KNOBS


def _check(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The knobs as plain numbers."""
    if name not in NAMES:
        raise UsageError(f"control is {shown(name)}; choose one of {', '.join(NAMES)}.")
    if name == "off" and given:
        knob = next(iter(given))
        having = ", ".join(one for one in NAMES if knob in knobs_of(one))
        raise UsageError(f'control "off" has no {knob}; choose one of {having} to set it.')
    for knob in given:
        if knob not in knobs_of(name):
            raise UsageError(f'control "{name}" has no {knob}; it has {", ".join(knobs_of(name))}.')
    return {knob: checked(name, knob, value) for knob, value in given.items()}


def checked(name: str, knob: str, value: Any) -> int | float:
    """Return a value of a preset's knob as a plain number. Raises UsageError where it is none, or out of range."""
    if knob in _COUNTED:
        least = 1 if knob == "prefill_budget" else 0
        return whole(knob, value, least, _MOST, f"from {least if least else '0 (off)'} to {_MOST}")
    if knob == "tau" and plain(value) in (math.inf, -math.inf):  # one of the models speaks alone
        return float(value)
    taken = number(knob, value)
    if knob == "target_entropy" and not taken > 0:
        raise UsageError(f"target_entropy is {taken}; it must be above 0 nats.")
    most = 1.0 if name == "certified" else math.inf
    if knob == "tolerance" and not 0 <= taken <= most:
        raise UsageError(f"tolerance is {taken}; under {name} it must be from 0 to {most:g}.")
    return taken


def _budget(tokens: int) -> EntropyBudget:
    return EntropyBudget(tokens=tokens, segment=max(1, min(EntropyBudget.segment, tokens // 4)), dense_until=2 * tokens)


def _paper(
    target_entropy: float | None = None, tolerance: float = 0.05, min_blocks: int = 3, window: int = 0
) -> Controller:
    active = select.ActiveSet(relative_influence, look_every=_LOOK_EVERY)
    return Controller(
        estimator=TailCorrectedEstimator(),
        law=_chained(*_thermostat(target_entropy), _threshold(tolerance)),
        selector=select.Guarded(active, sinks=0, window=window, min_blocks=min_blocks),
        priority=priority.LinearPriority(),
    )


def _guarded(
    target_entropy: float | None = None, tolerance: float = 0.05, min_blocks: int = 3, window: int = 64
) -> Controller:
    active = select.ActiveSet(relative_influence, look_every=_LOOK_EVERY)
    return Controller(
        law=_chained(*_cooling(target_entropy), _threshold(tolerance)),
        selector=select.Guarded(active, window=window, min_blocks=min_blocks),
        priority=_aged(),
    )


def _certified(
    target_entropy: float | None = None, tolerance: float = 0.05, min_blocks: int = 3, window: int = 64
) -> Controller:
    proved = select.PerHead(select.Certified(select.coded_bounds), AttentionEntropy())
    return _by_mean_values(proved, target_entropy, tolerance, min_blocks, window)


def _adaptive(
    target_entropy: float | None = None, tolerance: float = 1e-4, min_blocks: int = 3, window: int = 64
) -> Controller:
    return _by_mean_values(ExpectedError(), target_entropy, tolerance, min_blocks, window)


def _by_mean_values(
    selector: select.Selector, target_entropy: float | None, tolerance: float, min_blocks: int, window: int
) -> Controller:
    return Controller(
        law=_chained(*_cooling(target_entropy), tolerances.Constant(tolerance)),
        selector=select.Guarded(selector, window=window, min_blocks=min_blocks),
        priority=_aged(),
        residual=True,
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
