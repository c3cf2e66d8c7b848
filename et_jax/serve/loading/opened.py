"""Opens a model by name, or a module: resolves its files, checks that it fits in memory, and reads the weights."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from et_jax.decode.config import DecoderConfig
from et_jax.decode.plant import Weights
from et_jax.errors import UsageError
from et_jax.io.values import shown
from et_jax.models import stacks
from et_jax.models.adapters import beside, bytes_beside, read_adapter
from et_jax.models.calibration import Calibration, equal_heads, keep_calibration, read_calibration
from et_jax.models.checkpoint import check_weights, loaded_dtype, read_config, read_model, remarks, stored_dtype
from et_jax.models.checkpoint import load as load_checkpoint
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.hub import resolve
from et_jax.models.model import dtype_of, num_weights
from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import read_module
from et_jax.serve.config import PROGRAMS, EngineConfig
from et_jax.serve.loading import calibrating
from et_jax.serve.loading.sizing import decoder_config, lacks_sensitivity
from et_jax.serve.memory.device_memory import num_sharing, usable_memory
from et_jax.serve.memory.preflight import Plan, plan
from et_jax.serve.programs import preload
from et_jax.serve.programs.compilation import cache_programs, default_folder
from et_jax.text import Tokenizer, as_tokenizer, load_tokenizer
from et_jax.types import replace

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """Weights, tokenizer, and a decoder's configuration that fits in memory (`plan`).

    `weights` include those of second models, of configurations `others`. `remarks` are sentences on how the files were
    interpreted.
    """

    config: DecoderConfig
    weights: Weights
    others: tuple[ModelShape, ...]
    tokenizer: Tokenizer
    plan: Plan
    remarks: tuple[str, ...] = ()


def opened(settings: EngineConfig, report: Callable[[str], None]) -> Opened:
    """Return the model that `settings` name, read from its files; `report` receives progress messages.

    Remarks on the files are logged as warnings. Raises UsageError if a name, a file or a folder cannot be used, or if
    the model does not fit in memory, which is checked before weights are loaded.
    """

    def fit(folder: Path, model: ModelConfig | None = None, taken: int = 0) -> Plan:
        """Return the plan of a model, or of config.json if `model` is None. Raises UsageError if it does not fit.

        `taken` bytes of the memory are in use.
        """
        dtype = stored_dtype(folder, settings.dtype) if model is None else loaded_dtype(folder, model, settings.dtype)
        wanted = decoder_config(settings, model or read_config(folder), dtype, others=others)
        together = settings.tensor_parallel
        memory, replicas = usable_memory(settings.memory_fraction, together), num_sharing(settings.replicas, together)
        return plan(wanted, memory - taken, num_pages=settings.num_pages, replicas=replicas)

    _cache_programs(settings.compilation_cache, report)
    preload.begin(settings)
    small = {name: resolve(name) for name in settings.others}
    others = tuple(map(read_model, small.values()))
    report(f"loading {settings.name}")
    folder = resolve(settings.name, fit)
    model = read_model(folder)
    check_weights(folder, model)
    adapter = None if settings.lora is None else read_adapter(settings.lora, model)
    adapters = {name: read_adapter(place, model) for name, place in settings.adapter_folders.items()}
    fitting, tokenizer = fit(folder, model, bytes_beside(adapters.values())), load_tokenizer(folder)
    _check_others(settings, small, others, model, tokenizer, report)
    said = _remarked([folder], [model], settings.dtype) + _remarked_beside(small, others) + _unmeasured(settings)
    calibration = read_calibration(folder, model, settings.adapter) if settings.measures else equal_heads(model)
    sizes = partial(decoder_config, settings, model, num_pages=fitting.num_pages, others=others)
    if lacks_sensitivity(sizes(loaded_dtype(folder, model, settings.dtype), calibration=calibration)):
        calibration = _measured(settings, folder, model, calibration, tokenizer, report)
    mesh, added = sizes(jnp.float32).mesh, None if adapter is None else adapter.added
    how = {"stacked": _stacked(), "mesh": mesh, "added": added}
    model, params = load_checkpoint(folder, settings.dtype, settings.quantize, **how)
    dtype = dtype_of(params)
    params = beside(params, model, adapters) if adapters else params
    config = sizes(dtype, calibration=calibration)
    weights = params, *_others(small, dtype, settings.quantize, mesh, report)
    return Opened(config=config, weights=weights, others=others, tokenizer=tokenizer, plan=fitting, remarks=said)


def opened_module(
    settings: EngineConfig, module: Any, config: Any, tokenizer: Any, report: Callable[[str], None]
) -> Opened:
    """Return a caller's module, checked, with the second models that `settings` name.

    Raises UsageError if it is not supported, its vocabulary is smaller than the tokenizer's, or it does not fit.
    """
    if not isinstance(config, ModuleConfig):
        raise UsageError(f"config is {shown(config)}; give a ModuleConfig(max_positions=...) with a module.")
    if settings.dtype != "auto":
        raise UsageError(f"dtype is {settings.dtype}; leave it out, for a module has the dtype that it was made with.")
    if settings.quantize is not None:
        raise UsageError(f"quantize is {settings.quantize}; leave it out, for a module's weights are run as they are.")
    for name in ("lora", "adapters"):
        if (given := getattr(settings, name)) is not None:
            raise UsageError(f"{name} is {shown(given)}; leave it out, for a module brings its weights as they are.")
    _cache_programs(settings.compilation_cache, report)
    found = as_tokenizer(tokenizer, config.bos_token_id, config.eos_token_ids)
    beside = {name: resolve(name) for name in settings.others}
    others = tuple(map(read_model, beside.values()))
    report(f"inspecting {settings.name}")
    model, weights = read_module(module, config)
    if (most := max(found.backend.pieces(), default=-1)) >= model.vocab_size:
        raise UsageError(
            f"{settings.name} has a vocabulary of {model.vocab_size} tokens and the tokenizer one of {most + 1}; give "
            "the tokenizer that it was trained with."
        )
    for name, token in [("bos_token_id", found.bos_id), *(("eos_token_ids", token) for token in found.eos_ids)]:
        if token is not None and token >= model.vocab_size:
            raise UsageError(
                f"{settings.name} has a vocabulary of {model.vocab_size} tokens, without the id {token}; give "
                f"ModuleConfig({name}=...) of its own."
            )
    _check_others(settings, beside, others, model, found, report)
    calibration = config.calibration if settings.measures else equal_heads(model)
    sizes = partial(decoder_config, settings, model, model.dtype, calibration=calibration, others=others)
    memory, replicas = usable_memory(settings.memory_fraction), num_sharing(settings.replicas)
    fitting = plan(sizes(), memory, num_pages=settings.num_pages, replicas=replicas)
    served = sizes(num_pages=fitting.num_pages)
    if lacks_sensitivity(served):
        began = time.perf_counter()
        measured, _ = calibrating.measured_at_load(settings.name, model, weights, found, report)
        served = replace(served, calibration=replace(calibration, sensitivity=measured.sensitivity))
        seconds = time.perf_counter() - began
        report(f"measured in {seconds:.0f} s, for this run; ModuleConfig(calibration=...) reuses it.")
    said = _remarked_beside(beside, others) + _unmeasured(settings)
    every = weights, *_others(beside, model.dtype, None, None, report)
    return Opened(config=served, weights=every, others=others, tokenizer=found, plan=fitting, remarks=said)


def _measured(
    settings: EngineConfig,
    folder: Path,
    model: ModelConfig,
    known: Calibration,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
) -> Calibration:
    """Measure a model's sensitivity to each head, save it in the user's cache, and return it with `known`."""
    began = time.perf_counter()
    memory = usable_memory(settings.memory_fraction)
    params = calibrating.floats(folder, model, settings.dtype, memory, settings.adapter)
    found, facts = calibrating.measured_at_load(settings.name, model, params, tokenizer, report)
    try:
        stored = f"stored in {keep_calibration(folder, found, facts, settings.adapter)}"
    except UsageError as error:
        stored = f"not stored: {error}"
    report(f"{settings.name} was measured in {time.perf_counter() - began:.0f} s; {stored}".rstrip(".") + ".")
    return replace(known, sensitivity=found.sensitivity)


def _remarked(folders: Iterable[Path], models: Iterable[ModelConfig], dtype: str) -> tuple[str, ...]:
    """Return the remarks on the files of models, after logging them as warnings."""
    pairs = zip(folders, models, strict=True)
    said = tuple(remark for folder, model in pairs for remark in remarks(folder, model, dtype))
    for remark in said:
        _LOG.warning(remark)
    return said


def _remarked_beside(beside: Mapping[str, Path], others: Sequence[ModelConfig]) -> tuple[str, ...]:
    """Return the remarks on second models, which are cast to the first model's dtype."""
    return _remarked(beside.values(), others, "float32")


def _unmeasured(settings: EngineConfig) -> tuple[str, ...]:
    """Return, and log as a warning, a remark if calibrations are disabled."""
    if settings.measures:
        return ()
    remark = f"{settings.name}: with calibration none all heads count alike, and entropies are taken at temperature 1."
    _LOG.warning(remark)
    return (remark,)


def _others(
    beside: dict[str, Path],
    dtype: DTypeLike,
    quantize: str | None,
    mesh: Mesh | None,
    report: Callable[[str], None],
) -> Weights:
    """Return the weights of second models, given by names and folders, split over `mesh` if there is one."""
    weights = []
    for name, folder in beside.items():
        report(f"loading {name}, the small model")
        weights.append(load_checkpoint(folder, jnp.dtype(dtype).name, quantize, stacked=_stacked(), mesh=mesh)[1])
    return tuple(weights)


def _stacked() -> bool:
    """Return whether the weights of equal layers are stacked on this platform."""
    return stacks.stacked_on(jax.default_backend())


def _check_others(
    settings: EngineConfig,
    beside: dict[str, Path],
    others: Sequence[ModelConfig],
    model: ModelShape,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
) -> None:
    """Raise UsageError if a second model has a different tokenizer; report if it is not smaller."""
    for (name, folder), other in zip(beside.items(), others, strict=True):
        check_weights(folder, other)
        if load_tokenizer(folder).backend.pieces() != tokenizer.backend.pieces():
            raise UsageError(
                f"{name} and {settings.name} have different tokenizers; take a small model that has that of the other."
            )
        if num_weights(other) >= num_weights(model):
            report(f"{name}, the small model, has no fewer weights than {settings.name}: it will save nothing")


def _cache_programs(folder: str | Path | None, report: Callable[[str], None]) -> None:
    """Use a folder as the compile cache. Raises UsageError unless it is writable; the default one may fail."""
    if folder is None:
        return
    if folder != PROGRAMS:
        if problem := cache_programs(Path(folder)):
            raise UsageError(f"compilation_cache is {folder}, {problem}; choose another folder, or None.")
        return
    try:
        own = default_folder()
        problem = cache_programs(own)
    except UsageError as error:
        report(f"compiled programs are not cached: {error}")
    else:
        if problem is not None:
            report(f"compiled programs are not cached: {own}, {problem}")
