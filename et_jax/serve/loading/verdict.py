"""Whether a model will run on this machine, from its config.json, without downloading or reading a weight."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from et_jax.decode.backends import serving_backend
from et_jax.decode.cache.eight_bits import dtype_name
from et_jax.decode.config import DecoderConfig
from et_jax.errors import UsageError
from et_jax.models.adapters import read_adapter
from et_jax.models.calibration import read_calibration
from et_jax.models.checkpoint import is_widened, read_config, stored_dtype
from et_jax.models.config import ModelConfig
from et_jax.models.hub import resolve
from et_jax.models.model import num_weights
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading import chips
from et_jax.serve.loading.sizing import decoder_config, lacks_sensitivity
from et_jax.serve.memory.device_memory import num_sharing, usable_memory
from et_jax.serve.memory.preflight import Plan, plan


def verdict(settings: EngineConfig) -> list[str]:
    """Return readable lines: the model, its dtype, the kernels in use, the context length, and the memory.

    Raises UsageError, one sentence that says what to change, if the model cannot be read or does not fit.
    """
    folder, *others = (resolve(name, config_only=True) for name in (settings.name, *settings.others))
    model, beside = read_config(folder), tuple(map(read_config, others))
    if settings.lora is not None:
        read_adapter(settings.lora, model)
    for place in settings.adapter_folders.values():
        read_adapter(place, model)
    dtype = stored_dtype(folder, settings.dtype)
    widened = " (from float16; --dtype bfloat16 takes half)" if is_widened(folder, settings.dtype) else ""
    together = settings.tensor_parallel
    memory, replicas = usable_memory(settings.memory_fraction, together), num_sharing(settings.replicas, together)

    def planned(length: int | None) -> Plan:
        config = decoder_config(replace(settings, max_model_len=length), model, dtype, others=beside)
        return plan(config, memory, num_pages=settings.num_pages, replicas=replicas)

    def sized(split: ModelConfig) -> DecoderConfig:
        return decoder_config(replace(settings, tensor_parallel=1), split, dtype, others=beside)

    config = decoder_config(settings, model, dtype, others=beside)
    needed = chips.needed(model, sized, settings.memory_fraction)
    try:
        found = planned(settings.max_model_len)
    except UsageError as error:
        raise UsageError(f"{error} {needed[0].upper()}{needed[1:]}.") from error
    refusals = serving_backend(model, config.page_size, config.weights_dtype, config.cache_dtype)[1]
    windows = [window for window in model.windows if window is not None]
    seen = f", {len(windows)} of them with a window of {max(windows)} tokens" if windows else ""
    longest = _longest(planned, config.max_length, model.max_positions)
    return [
        f"{settings.name} runs here: {model.architecture}, {_count_text(num_weights(model))} weights, "
        f"{model.num_layers} layers{seen}",
        f"weights in {jnp.dtype(dtype).name}{widened}, cache in {dtype_name(config.cache_dtype)}",
        f"device {jax.devices()[0].device_kind}, attention by {config.backend}",
        *(f"not chosen: {refusal}" for refusal in refusals),
        *config.left_to_xla,
        *_to_measure(settings, config, folder),
        f"{config.num_slots} sequences of {config.max_length} tokens each; a single one may have {longest} "
        f"of the {model.max_positions} that the model was made for",
        *found.table(),
        needed,
    ]


def _to_measure(settings: EngineConfig, config: DecoderConfig, folder: Path) -> list[str]:
    """Return a line that announces a calibration at load time, or none if no calibration is missing."""
    if not (settings.measures and lacks_sensitivity(config)):
        return []
    if read_calibration(folder, config.model, settings.adapter).sensitivity is not None:
        return []
    return [
        "the sensitivity of the model's heads is not measured: loading measures it once, which takes minutes; "
        "--calibration none counts all heads alike instead"
    ]


def _longest(planned: Callable[[int], Plan], fitting: int, most: int) -> int:
    """Return the longest context that fits, in sixteenths of the model's context length, at least `fitting`."""
    for length in (most * part // 16 for part in range(16, 0, -1)):
        if length <= fitting:
            break
        try:
            planned(length)
        except UsageError:
            continue
        return length
    return fitting


def _count_text(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.2f} million"
