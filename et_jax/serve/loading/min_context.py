"""From which length on a preset pays, as measured: what `min_context` is where a preset is named and no number given.

Choosing blocks takes time whatever it spares, so short texts take longer under a preset that chooses than under `off`.
Where a model is loaded, or a call made, under a preset by its name, sequences shorter than the length measured read
everything, and nothing is scored for them. A `Preset`, or a `Controller`, that is given as a value is taken as it is:
there 0, scored at every length, is the default, as it is in `evaluate`.
"""

from collections.abc import Mapping

from et_jax.control.controller import Controller
from et_jax.control.presets import MOST, PRESETS, preset
from et_jax.io.knobs import knobs

NEVER = MOST
"""Tokens that no sequence has: it reads everything whatever its length."""

MEASURED: Mapping[str, Mapping[str, int]] = {
    "cpu": {"paper": NEVER, "guarded": NEVER, "certified": NEVER, "adaptive": NEVER},
}
"""Tokens by platform and preset: from where on a step took no longer than under `off` in any case measured.

The cases are those of benchmarks/results/steps.json and experiments/presets.json. In the first, with random keys of
which few stand out, `paper` and `guarded` pay from 2,048 tokens on; of a real model they read four fifths of the blocks
and do not.
A platform that is not here was not measured: presets choose at every length there.
"""


def usual(name: str, platform: str) -> int:
    """Return the least context that a preset chooses blocks of, on a platform as `jax.default_backend` names it.

    0 where that was not measured.
    """
    return MEASURED.get(platform, {}).get(name, 0)


def named(name: str, platform: str, **given: float | int | None) -> Controller:
    """Return the controller of a preset, with those of its knobs that are given; `min_context` is else the usual one.

    Raises UsageError as `presets.preset` does.
    """
    if "min_context" in knobs(PRESETS.get(name, PRESETS["off"])) and given.get("min_context") is None:
        given["min_context"] = usual(name, platform)
    return preset(name, **given)


def told(least: int) -> str:
    """Return in words from which length on blocks are chosen."""
    if least >= NEVER:
        return "never, for no length was found at which that saves time here"
    return f"of sequences of at least {least} tokens"
