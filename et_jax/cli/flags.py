"""Flags that several commands share."""

import argparse
from collections.abc import Mapping
from typing import Any

from et_jax.errors import UsageError
from et_jax.io import knobs

CACHE = ("cache_budget", "cache_policy")
"""What may be said of caches that shrink, under the names of `EngineConfig`."""

EXPERTS = ("experts", "expert_share")
"""What may be said of mixtures of experts, likewise."""


def add_control(parser: argparse.ArgumentParser, presets: Mapping[str, Any]) -> None:
    """Add the flags that choose the laws: one of the `presets`, and the knobs that its dataclass has."""
    control = parser.add_argument_group(
        "control", "Of a knob: what it is, and its default under each preset that has it."
    )
    control.add_argument(
        "--control", default="off", help=f"which laws run the decoder: {', '.join(presets)} (default off)"
    )
    for name in dict.fromkeys(name for one in presets.values() for name in knobs.knobs(one)):
        having = [knobs.knobs(one)[name] for one in presets.values() if name in knobs.knobs(one)]
        units = "|".join(dict.fromkeys(knob.unit.upper() for knob in having))
        flag = f"--{name.replace('_', '-')}"
        control.add_argument(flag, type=having[0].kind, metavar=units, help=knob_help(name, presets))
    control.add_argument("--small", metavar="MODEL", help="ead: the model that takes turns, such as bundled-small")
    control.add_argument(
        "--audit",
        action="store_true",
        help="ead: say how many words of one were likeliest to the other; entropyinfer: how much attention was kept",
    )
    control.add_argument("--lazy-prefill", action="store_true", help="ead: prompts are read by the small model alone")


def add_experts(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how many experts of a mixture a token goes to."""
    group = parser.add_argument_group("experts", "of a mixture: a token goes to as many as trained, or to fewer")
    group.add_argument(
        "--experts",
        choices=["top_k", "mass", "entropy"],
        help="how many: as trained (default), as few as hold a share of the gate, or a share that grows with entropy",
    )
    group.add_argument(
        "--expert-share",
        type=float,
        metavar="SHARE",
        help="the share of the gate's probability (mass: 0.9), or the least there is (entropy: 0.5)",
    )


def add_weights(group: argparse._ArgumentGroup) -> None:
    """Add the flags of what the weights are held in."""
    group.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    group.add_argument(
        "--quantize",
        choices=["int8"],
        help="hold matrices in 8 bits, and round what they are multiplied with to 8 bits (default: in --dtype)",
    )


def add_cache(group: argparse._ArgumentGroup) -> None:
    """Add the flags of what the cache keeps, and in which dtype."""
    group.add_argument(
        "--cache-dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32", "int8", "fp8"],
        help="what keys and values are kept in (default auto: the dtype of the weights; 8 bits: docs/quantized.md)",
    )
    group.add_argument(
        "--cache-budget",
        type=int,
        metavar="TOKENS",
        help="keep so many tokens of a sequence's cache for each head, and forget the rest (default: all)",
    )
    group.add_argument(
        "--cache-policy",
        metavar="NAME",
        help="which: latent (default), snapkv, adakv, pyramidkv, streaming or random (docs/entropyinfer.md)",
    )


def add_ray(group: argparse._ArgumentGroup) -> None:
    """Add the flags of batch jobs on Ray."""
    group.add_argument(
        "--ray",
        action="store_true",
        help="have --input, also a folder or a pattern such as 'in/*.jsonl', served by actors (docs/scale.md)",
    )
    group.add_argument("--ray-address", metavar="HOST:PORT", help="the cluster's head (default: one of this machine)")
    group.add_argument("--ray-actors", type=int, metavar="N", help="engines, each in a process of its own (default 1)")
    group.add_argument(
        "--ray-resources", metavar="NAME=AMOUNT,...", help="what each has: CPU=4, GPU=1, TPU=4 ... (default CPU=1)"
    )


def amounts(name: str, given: str) -> dict[str, float]:
    """Return what a flag says as NAME=AMOUNT,... Raises UsageError."""
    found = {}
    for pair in given.split(","):
        key, _, amount = pair.partition("=")
        try:
            found[key.strip()] = float(amount)
        except ValueError as error:
            raise UsageError(f"--{name} is {given!r}; write it as CPU=4 or CPU=8,GPU=1.") from error
    return found


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what was said of these settings, without those of which nothing was."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def knob_help(name: str, presets: Mapping[str, Any]) -> str:
    """Return what a knob means, with the presets that have it and its default under each."""
    having: dict[str, dict[str, list[str]]] = {}  # the presets of each meaning and default
    for preset, one in presets.items():
        if name in knobs.knobs(one):
            value = knobs.knobs(one)[name].usual or knobs.defaults(one)[name]
            default = "off" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
            having.setdefault(knobs.knobs(one)[name].help, {}).setdefault(default, []).append(preset)
    parts = []
    for meaning, defaults in having.items():
        each = (f"{', '.join(names)}: {default}" for default, names in defaults.items())
        parts.append(f"{meaning} ({'; '.join(each)})")
    return "; ".join(parts)
