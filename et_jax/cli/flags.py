"""Flags that several commands share."""

import argparse
from typing import Any

from et_jax.errors import UsageError

CONTROL = ("target_entropy", "tolerance", "min_blocks", "window", "tau", "prefill_budget")
"""Knobs of a preset, under the names that `presets.preset` gives them."""

CACHE = ("cache_budget", "cache_policy")
"""What may be said of caches that shrink, under the names of `EngineConfig`."""


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the laws: a preset, and its knobs."""
    control = parser.add_argument_group("control")
    control.add_argument(
        "--control",
        default="off",
        help="off (default), paper, guarded, certified, adaptive, ead, ead_guarded or entropyinfer: which laws run the "
        "decoder",
    )
    control.add_argument("--target-entropy", type=float, metavar="NATS", help="hold the entropy here by temperature")
    control.add_argument(
        "--tolerance",
        type=float,
        help="what may be left unread: a share of attention (default 0.05), under adaptive nats a token (0.0001)",
    )
    control.add_argument("--min-blocks", type=int, help="cache blocks always read per head (default 3)")
    control.add_argument("--window", type=int, help="recent tokens always read (default 64; paper: 0)")
    control.add_argument(
        "--tau", type=float, metavar="NATS", help="ead: up to this mean entropy the small model speaks (default 0.173)"
    )
    control.add_argument(
        "--prefill-budget",
        type=int,
        metavar="TOKENS",
        help="entropyinfer: what a prompt's segment reads (default 2048)",
    )
    control.add_argument("--small", metavar="MODEL", help="ead: the model that takes turns, such as bundled-small")
    control.add_argument(
        "--audit",
        action="store_true",
        help="ead: say how many words of one were likeliest to the other; entropyinfer: how much attention was kept",
    )
    control.add_argument("--lazy-prefill", action="store_true", help="ead: prompts are read by the small model alone")


def add_cache(group: argparse._ArgumentGroup) -> None:
    """Add the flags of caches that shrink."""
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


def knobs(args: argparse.Namespace) -> dict[str, float | int | None]:
    """Return what was given of a preset's knobs, None where nothing was."""
    return {name: getattr(args, name) for name in CONTROL}
