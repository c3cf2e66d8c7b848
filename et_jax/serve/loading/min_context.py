"""Measured context lengths from which a preset saves time: the default of `min_context` for a preset given by name.

Block selection costs time even if it saves reads, so short sequences decode slower under a preset with selection than
under `off`. Under a preset given by name, sequences shorter than the measured length read every block, without scoring.
A `Preset` or `Controller` given as a value is used unchanged: its default is 0, scoring at every length, as in
`evaluate`.
"""

from collections.abc import Mapping

from et_jax.control.controller import Controller
from et_jax.control.presets import MOST, PRESETS, preset
from et_jax.io.knobs import knobs

NEVER = MOST
"""A length that no sequence reaches: every block is read at any length."""

MEASURED: Mapping[str, Mapping[str, int]] = {
    "cpu": {"paper": NEVER, "guarded": NEVER, "certified": NEVER, "adaptive": NEVER, "share": 4096}
}
"""Tokens by platform and preset, from which on a step took no longer than under `off` in any measured case.

The cases are those of steps.json, presets.json, presets_bursts.json, presets_scan.json, presets_batch.json and
presets_gemma.json in benchmarks/results. In the first, with random keys of which few stand out, `paper` and `guarded`
save time from 2,048 tokens on. With a real model they read nine tenths of the blocks, and do not save time. Other
platforms were not measured: presets select blocks at every length there.
"""


def usual(name: str, platform: str) -> int:
    """Return the least context in tokens at which a preset selects blocks; 0 if that was not measured.

    `platform` is a name of `jax.default_backend`.
    """
    return MEASURED.get(platform, {}).get(name, 0)


def named(name: str, platform: str, **given: float | int | None) -> Controller:
    """Return the controller of a preset with the given knobs; the default of `min_context` is `usual`.

    Raises UsageError as `presets.preset` does.
    """
    made = preset(name, **given)
    if "min_context" not in knobs(PRESETS[name]) or given.get("min_context") is not None:
        return made
    return preset(name, **given | {"min_context": usual(name, platform)})


def described(least: int) -> str:
    """Return in words from which length on blocks are selected."""
    if least >= NEVER:
        return "never, for no length was found at which that saves time here"
    return f"of sequences of at least {least} tokens"
