"""Flags that several commands share."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io import knobs, texts

CACHE = ("cache_budget", "cache_policy")
"""The settings of cache compression, under the names of `EngineConfig`."""

EXPERTS = ("experts", "expert_share")
"""The settings of mixtures of experts, likewise."""


def add_control(parser: argparse.ArgumentParser, presets: Mapping[str, Any]) -> None:
    """Add the flags of the laws: one of the `presets`, and the knobs of its dataclass."""
    control = parser.add_argument_group(
        "control", "Of a knob: its meaning, and its default under each preset that has it."
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
        help="ead: report how many tokens of one were likeliest to the other; entropyinfer: how much mass was read",
    )
    control.add_argument("--lazy-prefill", action="store_true", help="ead: only the small model reads prompts")


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add the flags of sampling."""
    group.add_argument("--temperature", "--temp", type=float, default=1.0, help="0 is greedy (default 1)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0, off)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass (1, off)")
    group.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best (0, off)")
    group.add_argument("--top-n-sigma", type=float, default=0.0, help="keep logits within so many deviations (0, off)")
    group.add_argument(
        "--min-k", type=float, default=0.0, help="keep logits above their cliff (3 as published; 0, off)"
    )
    group.add_argument("--typical-p", type=float, default=1.0, help="keep this mass nearest to the entropy (1, off)")
    group.add_argument("--eta-cutoff", type=float, default=0.0, help="keep what is likely for this entropy (0, off)")
    group.add_argument("--top-h", type=float, default=0.0, help="keep the likeliest of this share of entropy (0, off)")
    group.add_argument("--p-less", action="store_true", help="keep tokens likelier than a draw would guess right (off)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 shuns repeats (1, off)")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="subtracted from used tokens (0, off)")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="subtracted per use (0, off)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--min-tokens", type=int, default=0, help="tokens before the text may end (default 0)")
    group.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never draw its tokens; repeatable"
    )
    group.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=BIAS", help="add to a token's logit; repeatable"
    )
    group.add_argument("--json-schema", metavar="FILE", help="the text is JSON that follows the schema in this file")
    group.add_argument("--regex", default="", metavar="TEXT", help="the text follows this regular expression")
    group.add_argument("--choice", nargs="+", default=[], metavar="TEXT", help="the text is one of these")
    group.add_argument("--logprobs", type=int, default=0, help="alternatives of every token, in --json and --trace (0)")
    group.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    group.add_argument("--n", type=int, default=1, help="continuations of the prompt (default 1)")
    group.add_argument("--best-of", type=int, default=1, help="sample so many and print the likeliest --n of them")


def biases(given: Sequence[str]) -> dict[int, float]:
    """Return the biases of `--logit-bias ID=BIAS`. Raises UsageError for anything else."""
    found = {}
    for one in given:
        token, _, bias = one.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise UsageError(f"--logit-bias is {one}; write a token id and a number, as in 42=-1.5.") from error
    return found


def schema(file: str) -> dict[str, Any]:
    """Return the schema in the file of `--json-schema`. Raises UsageError where there is none."""
    text = texts.read_text(Path(file), "--json-schema")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {file} is not JSON ({error}); correct it.") from error
    if not isinstance(found, dict):
        raise UsageError(f"--json-schema {file} is not a JSON object; write a schema as {{...}}.")
    return found


def add_drafts(group: argparse._ArgumentGroup) -> None:
    """Add the flags of drafting."""
    group.add_argument(
        "--draft",
        metavar="lookup|self|MODEL|lookup+self|lookup+MODEL",
        help="lookup: what followed an earlier match in the text; self: by the model, with sparse attention; "
        "MODEL: by a smaller model, such as bundled-small; with lookup+ where a lookup has no guess",
    )
    group.add_argument("--draft-tokens", type=int, help="drafted in a step at most (default 8)")
    group.add_argument(
        "--draft-share", type=float, help="of a long text's blocks, those that self reads at most (default 0.08)"
    )
    group.add_argument(
        "--draft-length",
        choices=["acceptance", "entropy", "fixed"],
        help="how many: by the acceptance rate (default), by the model's certainty, or always the maximum",
    )


def add_experts(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the number of experts per token."""
    group = parser.add_argument_group("experts", "of a mixture: a token is routed to as many as trained, or to fewer")
    group.add_argument(
        "--experts",
        choices=["top_k", "mass", "entropy"],
        help="how many: as trained (default), the fewest with a share of the gate, or a share that grows with entropy",
    )
    group.add_argument(
        "--expert-share",
        type=float,
        metavar="SHARE",
        help="the share of the gate's probability (mass: 0.9), or its minimum (entropy: 0.5)",
    )


def add_weights(group: argparse._ArgumentGroup) -> None:
    """Add the flags of what is merged into the weights, and of their form."""
    add_lora(group)
    group.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    group.add_argument(
        "--quantize",
        choices=["int8"],
        help="store matrices in 8 bits, and round what they are multiplied with to 8 bits (default: in --dtype)",
    )


def add_lora(parser: argparse._ActionsContainer) -> None:
    """Add the flag of an adapter."""
    parser.add_argument("--lora", metavar="FOLDER", help="merge a LoRA adapter, as PEFT saves it, into the weights")


def add_adapters(parser: argparse._ActionsContainer) -> None:
    """Add the flag of adapters that lines name."""
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help="a LoRA adapter for lines of that name"
    )


def adapters(given: Sequence[str]) -> dict[str, str] | None:
    """Return the folders of `--adapter NAME=FOLDER` by name. Raises UsageError for anything else."""
    found = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder) or name in found:
            raise UsageError(f"--adapter is {one}; write a name of its own and a folder, as in french=adapters/french.")
        found[name] = folder
    return found or None


def add_prefix(parser: argparse._ActionsContainer) -> None:
    """Add the flags of prompts whose cache pages are in a file."""
    parser.add_argument("--save-prefix", metavar="FILE", help="write the cache pages of --prompt for --prefix")
    parser.add_argument(
        "--prefix", metavar="FILE", help="read prompts that begin as a saved one does from its pages on"
    )


def add_calibration(group: argparse._ArgumentGroup) -> None:
    """Add the flag of the model's measurements."""
    group.add_argument(
        "--calibration",
        default="auto",
        choices=["auto", "none"],
        help="auto: use the model's measured sensitivity, and measure it if the control needs it; "
        "none: treat all heads alike (docs/control.md)",
    )


def add_cache(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the cache's size and dtype."""
    group.add_argument(
        "--cache-dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32", "int8", "fp8"],
        help="the dtype of keys and values (default auto: the dtype of the weights; 8 bits: docs/models.md)",
    )
    group.add_argument(
        "--cache-budget",
        type=int,
        metavar="TOKENS",
        help="keep so many tokens of a sequence's cache for each head, and drop the rest (default: all)",
    )
    group.add_argument(
        "--cache-policy",
        metavar="NAME",
        help="which: latent (default), snapkv, adakv, pyramidkv, streaming or random (docs/long_context.md)",
    )


def add_ray(group: argparse._ArgumentGroup) -> None:
    """Add the flags of batch jobs on Ray."""
    group.add_argument(
        "--ray",
        action="store_true",
        help="have --input, also a folder or a pattern such as 'in/*.jsonl', served by actors (docs/batch.md)",
    )
    group.add_argument("--ray-address", metavar="HOST:PORT", help="the cluster's head (default: one of this machine)")
    group.add_argument("--ray-actors", type=int, metavar="N", help="engines, each in its own process (default 1)")
    group.add_argument(
        "--ray-resources", metavar="NAME=AMOUNT,...", help="of each engine: CPU=4, GPU=1, TPU=4 ... (default CPU=1)"
    )


def amounts(name: str, given: str) -> dict[str, float]:
    """Return the amounts of a flag NAME=AMOUNT,... Raises UsageError."""
    found = {}
    for pair in given.split(","):
        key, _, amount = pair.partition("=")
        try:
            found[key.strip()] = float(amount)
        except ValueError as error:
            raise UsageError(f"--{name} is {given!r}; write it as CPU=4 or CPU=8,GPU=1.") from error
    return found


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return these settings as given, without unset ones."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def knob_help(name: str, presets: Mapping[str, Any]) -> str:
    """Return the meaning of a knob, with the presets that have it and its default under each."""
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


def check_combination(args: argparse.Namespace) -> None:
    """Raise UsageError if a flag of the command requires another one, or excludes it."""
    for name in ("ray_address", "ray_actors", "ray_resources"):
        if getattr(args, name) is not None and not args.ray:
            raise UsageError(f"--{name.replace('_', '-')} needs --ray; without it one process runs all lines.")
    if args.ray and args.input is None:
        raise UsageError("--ray is for --input; one prompt runs in one process.")
    for name in ("metrics", "report"):
        if args.ray and getattr(args, name) is not None:
            raise UsageError(f"--{name} reports on one process and its output; leave it or --ray out.")
    if args.adapter and args.input is None and not args.check:
        raise UsageError("--adapter is for --input, whose lines name adapters; merge one with --lora.")
    if args.prompt_column is not None and args.input is None:
        raise UsageError("--prompt-column is for --input; it names the field with the prompt of a line.")
    if args.save_prefix is not None and args.prompt is None:
        raise UsageError("--save-prefix is for --prompt, whose pages it writes.")
    if args.prefix is not None and (args.ray or args.check):
        raise UsageError(f"--prefix is not for {'--ray' if args.ray else '--check'}; leave it out.")
    if args.interactive:
        for name in ("output", "trace", "plot", "json", "no_stream", "metrics", "report"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')} is not for --interactive; /save and /trace are there.")
        for flag, number in (("--n", args.n), ("--best-of", args.best_of)):
            if number != 1:
                raise UsageError(f"{flag} is {number}; a chat has one answer to a turn.")
        return
    if args.input is None:
        if args.system_prompt is not None and not args.chat:
            raise UsageError("--system-prompt needs --chat; without a chat template there is no place for it.")
        if args.allow_special_tokens and not args.chat:
            raise UsageError("--allow-special-tokens needs --chat; a prompt without it is read with special tokens.")
        if args.output is not None:
            raise UsageError("--output is for --input; the text of --prompt goes to standard output.")
        return
    for name in ("trace", "plot", "json", "no_stream"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} is for --prompt; the answers to --input are in its --output.")
    if args.output is None:
        raise UsageError("--input needs --output; name the file that the answers go to.")
