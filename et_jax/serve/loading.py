"""From a model's name to what serves it: found, measured against the memory there is, and only then read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from et_jax.decode.state import DecoderConfig
from et_jax.errors import UsageError
from et_jax.models.calibration import read_calibration
from et_jax.models.checkpoint import check_weights, read_config, stored_dtype
from et_jax.models.checkpoint import load as load_checkpoint
from et_jax.models.hub import resolve
from et_jax.models.transformer import Params
from et_jax.serve.compilation import keep_programs
from et_jax.serve.config import PROGRAMS, EngineConfig
from et_jax.serve.device_memory import num_sharing, usable_memory
from et_jax.serve.preflight import Plan, plan
from et_jax.serve.sizing import check_measured, decoder_config
from et_jax.text import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """Weights, tokenizer, and the sizes of a decoder for them that fit, as `plan` says."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer
    plan: Plan


def opened(settings: EngineConfig, tell: Callable[[str], None]) -> Opened:
    """Return what `settings` name, read; `tell` is told what is going on.

    Raises UsageError where a name, a file or a folder cannot be used, or where not all of it would fit; that is found
    out before a weight is read.
    """

    def fit(folder: Path) -> Plan:
        """What it will need, from config.json alone. Raises UsageError where that is too much."""
        wanted = decoder_config(settings, read_config(folder), stored_dtype(folder, settings.dtype))
        memory = usable_memory(settings.memory_fraction)
        return plan(wanted, memory, num_pages=settings.num_pages, replicas=num_sharing(settings.replicas))

    _keep_programs(settings.compilation_cache, tell)
    tell(f"loading {settings.name}")
    folder = resolve(settings.name, fit)
    check_weights(folder, read_config(folder))
    fitting, tokenizer = fit(folder), load_tokenizer(folder)
    model, params = load_checkpoint(folder, settings.dtype)
    dtype, calibration = params.embedding.dtype, read_calibration(folder, model)
    config = decoder_config(settings, model, dtype, num_pages=fitting.num_pages, calibration=calibration)
    check_measured(settings.name, config)
    return Opened(config=config, params=params, tokenizer=tokenizer, plan=fitting)


def _keep_programs(folder: str | Path | None, tell: Callable[[str], None]) -> None:
    """Keep compiled programs in a folder; of all folders only the default may be one that cannot be written."""
    problem = None if folder is None else keep_programs(Path(folder))
    if problem is None:
        return
    if folder != Path(PROGRAMS):
        raise UsageError(f"compilation_cache is {folder}, {problem}; choose another folder, or None.")
    tell(f"compiled programs are not kept: {folder}, {problem}")
