"""The settings that the arguments of `python -m et_jax.generate` mean."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from et_jax.cli import flags
from et_jax.control.presets import KNOBS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from et_jax.batch.tasks import Defaults
    from et_jax.control.controller import Controller
    from et_jax.serve.config import EngineConfig
    from et_jax.serve.requests import SamplingParams

_ALTERNATIVES = 5  # of each token in a report


def named(args: argparse.Namespace, kind: type["DataclassInstance"]) -> dict[str, Any]:
    """Return the arguments that have the names of fields of a dataclass."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


def defaults(args: argparse.Namespace) -> "Defaults":
    """Return the settings of the lines of a batch that have none of their own."""
    from et_jax.batch.tasks import Defaults

    return Defaults(params=sampling(args), **named(args, Defaults))


def batch_settings(
    args: argparse.Namespace, engine: "EngineConfig", defaults: "Defaults", platform: str
) -> dict[str, Any]:
    """Return all that the answers of a batch depend on beside its lines: what may change their last bits too.

    The number of pages and of replicas, and how much of the prompts is read between two steps, changes none.
    """
    from et_jax.models.fingerprint import adapter_fingerprint, fingerprint
    from et_jax.models.hub import resolve

    beside: dict[str, Any] = {} if args.small is None else {"small_files": fingerprint(resolve(args.small))}
    if engine.adapters:
        beside["adapter"] = {name: adapter_fingerprint(folder) for name, folder in engine.adapter_folders.items()}
    return {
        "model": args.model,
        "model_files": fingerprint(resolve(args.model), engine.adapter),
        **beside,
        "platform": platform,
        **flags.given(args, ("input_commit",)),
        **engine.decisive,
        "control": args.control,
        **({} if (least := engine.laws.min_context) is None else {"min_context": least}),
        **flags.given(args, KNOBS),
        **dataclasses.asdict(defaults),
    }


def sampling(args: argparse.Namespace) -> "SamplingParams":
    """Return the sampling settings; for the report of a prompt with the alternatives that it shows."""
    from et_jax.serve.requests import SamplingParams

    given = named(args, SamplingParams)
    given |= {"stop": tuple(args.stop), "bad_words": tuple(args.bad_word), "logit_bias": flags.biases(args.logit_bias)}
    given |= {"choice": tuple(args.choice)}
    given |= {"json_schema": "" if args.json_schema is None else flags.schema(args.json_schema)}
    given |= {"logprobs": _ALTERNATIVES} if args.report is not None and args.input is None else {}
    return SamplingParams(**given)


def controller(args: argparse.Namespace, platform: str) -> "Controller":
    """Return the laws that the command line names, with the defaults of a platform."""
    from et_jax.serve.loading import min_context

    return min_context.named(args.control, platform, **flags.given(args, KNOBS))


def engine(args: argparse.Namespace, max_num_seqs: int, control: "Controller") -> "EngineConfig":
    """Return the settings of the engine that the command line has; of sequences at once `max_num_seqs` by default."""
    from et_jax.serve.config import EngineConfig

    given = named(args, EngineConfig) | {"name": args.model, "control": control}
    given |= {"trace_reads": args.report is not None, "adapters": flags.adapters(args.adapter)}
    return EngineConfig(**given | ({"max_num_seqs": max_num_seqs} if args.max_num_seqs is None else {}))


def facts(args: argparse.Namespace) -> dict[str, str]:
    """Return the facts of a run for the head of a report."""
    import jax

    sampled = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")}
    given = {"model": args.model, "control": args.control}
    given |= flags.given(args, (*KNOBS, *flags.CACHE, *flags.EXPERTS, "lora", "quantize", "draft", "small"))
    shown = {name.replace("_", " "): str(value) for name, value in (given | sampled).items()}
    return shown | {"device": jax.devices()[0].device_kind}
