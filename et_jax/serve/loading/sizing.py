"""Derives a decoder's configuration from the engine's settings and the model, and checks every size."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from et_jax.control.budget import Budget
from et_jax.control.compression import Compression, named
from et_jax.control.controller import Controller
from et_jax.decode import compat
from et_jax.decode.backends import serving_backend
from et_jax.decode.cache.eight_bits import dtype_named
from et_jax.decode.cache.kv import token_bytes
from et_jax.decode.config import DecoderConfig, Keep
from et_jax.decode.drafting.drafts import ReadSizes
from et_jax.errors import UsageError
from et_jax.io.schema import MAX_EOS_IDS
from et_jax.models import sharding
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.model import num_weights, weight_bytes
from et_jax.models.module import ModuleModel
from et_jax.serve.config import AUTO, EngineConfig
from et_jax.serve.requests import MAX_LOGPROBS, MAX_STOP_IDS
from et_jax.types import replace

DEFAULT_PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_MANY = 16  # sequences per step, from which on a larger prefill batch is usually filled by waiting prompts
_CHUNK = {"cpu": 16}  # tokens of a prompt per row; elsewhere 128, enough for a tile of queries
_MAX_STEPS = 32  # the most steps of a burst, between two transfers to the host


def decoder_config(
    settings: EngineConfig,
    model: ModelShape,
    dtype: DTypeLike,
    *,
    num_pages: int | None = None,
    calibration: Calibration | None = None,
    others: tuple[ModelShape, ...] = (),
) -> DecoderConfig:
    """Return the decoder configuration of a model with weights of `dtype`, and of its second models `others`.

    The cache has that dtype too, unless the settings name another. Without `num_pages`, here or in the settings, every
    resident sequence has pages for its full length. Raises UsageError, one sentence, for a size that cannot work.
    """
    num_pages = settings.num_pages if num_pages is None else num_pages
    mesh, model = _mesh(settings, model), sharding.with_copies(model, settings.tensor_parallel)
    length = model.max_positions if settings.max_model_len is None else settings.max_model_len
    if not 2 <= length <= model.max_positions:
        raise UsageError(
            f"max_model_len is {length}; {settings.name} was made for {model.max_positions} tokens, "
            "so choose from 2 to that."
        )
    platform = jax.default_backend()
    page_size = settings.page_size or DEFAULT_PAGE_SIZE.get(platform, 64)
    if num_pages is not None and num_pages < 2:
        raise UsageError(f"num_pages is {num_pages}; it must be at least 2, because page 0 is the null page.")
    batch = max(2, settings.max_num_seqs)  # XLA compiles a single row to a different, slower program
    num_slots = settings.max_resident_seqs or batch
    if num_slots < batch:
        raise UsageError(
            f"max_resident_seqs is {num_slots}; it must be at least the {batch} sequences that a step serves."
        )
    chunk, prefill_batch = _prefill_sizes(settings, length, page_size, None)
    everything = num_slots * -(-length // page_size) + 1
    cache_dtype = dtype if settings.cache_dtype == AUTO else dtype_named(settings.cache_dtype)
    plain = DecoderConfig(
        model=model.reading(length),
        num_slots=num_slots,
        batch=batch,
        page_size=page_size,
        num_pages=everything if num_pages is None else num_pages,
        mesh=mesh,
        max_length=length,
        prefill_batch=prefill_batch,
        chunk=chunk,
        max_steps=_MAX_STEPS,
        cache_dtype=cache_dtype,
        backend=settings.backend or serving_backend(model, page_size, dtype, cache_dtype)[0],
        dtype=dtype,
        quantize=settings.quantize,
        num_logprobs=MAX_LOGPROBS,
        num_stop_ids=MAX_EOS_IDS + MAX_STOP_IDS,
        penalties=True,
        calibration=(calibration or Calibration()).of(model),
        compression=_compression(settings, model, page_size),
        trace_reads=settings.trace_reads,
        num_adapters=len(settings.adapters or ()),
    )
    return beside(settings, plain, settings.laws, others, for_one_call=False)


def beside(
    settings: EngineConfig,
    config: DecoderConfig,
    laws: Controller,
    others: tuple[ModelShape, ...],
    keep: frozenset[Keep] = frozenset(),
    *,
    for_one_call: bool = True,
) -> DecoderConfig:
    """Return the configuration under other laws, with the second model or drafting that they and the settings require.

    If the laws have a switch, a model of `others` alternates with this one; otherwise tokens are drafted if the
    settings say so. Raises UsageError if the laws and the settings are not supported together, or a second model is
    incompatible.
    """
    chunk, prefill_batch = config.chunk, config.prefill_batch
    if laws.budget is not None or config.controller.budget is not None:
        chunk, prefill_batch = _prefill_sizes(settings, config.max_length, config.page_size, laws.budget)
    alone = partial(replace, config, draft=None, others=(), lazy=False, audit=False, keep=keep)
    alone = partial(alone, controller=laws, chunk=chunk, prefill_batch=prefill_batch)
    _check(settings, config, laws, keep, lambda: alone().law_sets, for_one_call)
    for name, other in zip(settings.others, others, strict=True):
        _check_beside(name, other, config)
    copied = (sharding.with_copies(other, settings.tensor_parallel) for other in others)
    others = tuple(other.reading(config.max_length) for other in copied)
    if laws.switch is not None:
        return alone(others=others, lazy=settings.lazy_prefill, audit=settings.audit)
    costs = [num_weights(other) / num_weights(config.model) for other in others]
    drafting = settings.drafting(config.batch, read_sizes(alone()), *costs)
    drafters = others if settings.draft_model else ()
    return alone(draft=drafting, others=drafters, audit=settings.audit and laws.budget is not None)


def read_sizes(config: DecoderConfig) -> ReadSizes:
    """Return the bytes that a decoder's step reads, from which draft lengths are derived."""
    model, plant = config.model, config.plants[0]
    layers = [(model.softmax(index), not one.reads_all) for index, one in enumerate(config.selectors)]
    return ReadSizes(
        weights=weight_bytes(model, config.weights_dtype, config.quantize),
        token=plant.all_kv_heads * token_bytes(model.head_dim, config.cache_dtype),
        layers=model.num_layers,
        together=all(plant.reads_together(softmax, selected=chosen) for softmax, chosen in layers),
    )


def _check(
    settings: EngineConfig,
    config: DecoderConfig,
    laws: Controller,
    keep: frozenset[Keep],
    sets: Callable[[], frozenset[str]],
    for_one_call: bool,
) -> None:
    """Raise UsageError if the settings, the sizes derived from them and the laws are not supported together."""
    layout = config.layout
    case = settings.case(
        laws,
        sets=sets,
        num_layers=config.model.num_layers,
        mixture=config.model.experts is not None,
        needs=keep,
        room=None if layout is None else layout.region * config.page_size,
        length=config.max_length,
    )
    compat.check(case, for_one_call=for_one_call)


def _prefill_sizes(settings: EngineConfig, length: int, page_size: int, budget: Budget | None) -> tuple[int, int]:
    """Return the tokens of a prefill row (a segment under a budget), and those of all rows of a call.

    Raises UsageError for a budget of less than a block.
    """
    platform = jax.default_backend()
    few = 128 if settings.max_num_seqs >= _MANY else 64
    prefill_batch = settings.prefill_batch or (few if platform == "cpu" else 512)
    prefill_batch = _multiple(min(prefill_batch, length), page_size)
    chunk = _multiple(min(_CHUNK.get(platform, 128), prefill_batch), page_size)
    if budget is not None:
        if 0 < budget.fewest_tokens < page_size:
            raise UsageError(
                f"A prefill budget of {budget.fewest_tokens} tokens is less than a block of {page_size}; "
                "choose a larger one."
            )
        chunk = _multiple(budget.segment, page_size)
    return chunk, _multiple(prefill_batch, chunk)


def _mesh(settings: EngineConfig, model: ModelShape) -> Mesh | None:
    """Return the mesh of the first replica, None for one device. Raises UsageError if the model cannot be split so."""
    size, devices = settings.tensor_parallel, jax.local_devices()
    if size == 1:
        return None
    if jax.process_count() > 1:
        raise UsageError("tensor_parallel splits a model over the devices of one process; run one process only.")
    if size > len(devices):
        virtual = ""
        if devices[0].platform == "cpu":
            virtual = f" (XLA_FLAGS=--xla_force_host_platform_device_count={size} divides this CPU into as many)"
        raise UsageError(
            f"tensor_parallel is {size}, above the number of devices, {len(devices)}; choose at most that{virtual}."
        )
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise UsageError(
            f"tensor_parallel needs devices of one kind, and there are {' and '.join(kinds)}; hide the others."
        )
    if not isinstance(model, ModelConfig):
        raise UsageError(f"tensor_parallel cannot split {settings.name}, a module; leave it out.")
    _check_size(size, settings.name, model)
    return sharding.mesh_of(size)


def _check_size(size: int, name: str, model: ModelConfig) -> None:
    """Raise UsageError if a model cannot be split over `size` devices."""
    if size not in (possible := sharding.sizes(model)):
        raise UsageError(
            f"tensor_parallel is {size}; {name} can be split over {', '.join(map(str, possible))} devices, "
            "which divide its heads, widths and vocabulary."
        )


def _compression(settings: EngineConfig, model: ModelShape, page_size: int) -> Compression | None:
    """Return the compression of `cache_budget`; for a number it repeats when the cache has grown by a quarter of it.

    "snapkv" ranks only by the queries of the prompt, so it compresses once.
    """
    asked = settings.cache_budget
    if asked is None:
        return None
    widest = max((window for window in model.windows if window is not None), default=0)
    budget, window = (asked.budget, asked.window) if isinstance(asked, Compression) else (asked, Compression.window)
    if budget % page_size or budget <= window or budget < widest:
        sliding = f" and hold the sliding window of {widest} tokens" if widest else ""
        raise UsageError(
            f"cache_budget is {budget}; it must be a multiple of page_size, {page_size}, above {window}{sliding}."
        )
    if isinstance(asked, Compression):
        return asked
    return named(settings.policy, budget, every=0 if settings.policy == "snapkv" else max(1, budget // 4))


def _check_beside(name: str, other: ModelShape, config: DecoderConfig) -> None:
    if other.vocab_size != config.model.vocab_size:
        raise UsageError(
            f"{name} has a vocabulary of {other.vocab_size} tokens and the model one of {config.model.vocab_size}; "
            "take a small model of the same vocabulary."
        )
    if other.max_positions < config.max_length:
        raise UsageError(
            f"{name}, the small model, was made for {other.max_positions} tokens and max_model_len is "
            f"{config.max_length}; lower that, or take another model."
        )
    if config.mesh is not None and isinstance(other, ModelConfig):
        _check_size(config.mesh.size, name, other)


def lacks_sensitivity(config: DecoderConfig) -> bool:
    """Return whether the controller selects blocks by a sensitivity of heads that was not measured."""
    needed: frozenset[str] = frozenset().union(*(selector.needs for selector in config.selectors))
    chooses = config.may_choose(config.controller)
    return "sensitivity" in needed and chooses and config.calibration.sensitivity is None


def check_measured(name: str, config: DecoderConfig) -> None:
    """Raise UsageError if the controller requires a calibration that the model lacks."""
    if lacks_sensitivity(config):
        own = isinstance(config.model, ModuleModel)
        command = "" if own else f", run python -m et_jax.calibrate --model {name}"
        raise UsageError(
            f"{name} has no measured sensitivity of heads, which this control requires; load it under this control, "
            f"which measures it{command}, or choose certified."
        )


def _multiple(size: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
