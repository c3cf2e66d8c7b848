"""From what a caller asks of a model to the configuration of its decoder, every size checked."""

import jax
from jax.typing import DTypeLike

from et_jax.control.controller import Controller
from et_jax.control.presets import NAMES, preset
from et_jax.decode.attention import serving_backend
from et_jax.decode.state import DecoderConfig
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.io.schema import MAX_EOS_IDS
from et_jax.models.config import ModelConfig
from et_jax.pallas.backend import NAMES as BACKENDS
from et_jax.serve.requests import MAX_LOGPROBS, MAX_STOP_IDS

DEFAULT_PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_MANY = 16  # sequences at once, from which on prompts are more often short of a call than a call of prompts
_CHUNK = {"cpu": 16}  # tokens of a prompt that stand in one row; elsewhere 128, enough for a tile of queries
_MAX_STEPS = 32  # tokens the device may produce before the host looks at them

Control = str | Controller
"""A preset by name, see `presets.preset`, or a controller of one's own."""


def controller(control: Control) -> Controller:
    """Return the controller that `control` names or is. Raises UsageError for anything else."""
    if isinstance(control, str):
        return preset(control)
    if not isinstance(control, Controller):
        advice = "; write Controller(law=...) for a law" if callable(control) else ""
        raise UsageError(
            f"control is {values.shown(control)}; it must be one of {', '.join(NAMES)} or a Controller{advice}."
        )
    try:
        hash(control)
    except TypeError as error:
        raise UsageError(f"control cannot be told from others ({error}); write its lists as tuples.") from error
    return control


def check_backend(backend: str | None) -> str | None:
    """Return `backend`, which names kernels. Raises UsageError where it does not."""
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"backend is {values.shown(backend)}; choose one of {', '.join(BACKENDS)} or None.")
    return backend


def decoder_config(
    name: str,
    model: ModelConfig,
    dtype: DTypeLike,
    *,
    page_size: int | None,
    max_model_len: int | None,
    num_pages: int | None,
    max_num_seqs: int,
    max_resident_seqs: int | None,
    prefill_batch: int | None,
    control: Control,
    calibration: float,
    backend: str | None,
) -> DecoderConfig:
    """Return the decoder of model `name`; the arguments are those of `engine.load`.

    Without `num_pages` every resident sequence has pages for its full length. Raises UsageError, one
    sentence, for a size that cannot work.
    """
    length = model.max_positions if max_model_len is None else max_model_len
    if not 2 <= length <= model.max_positions:
        raise UsageError(
            f"max_model_len is {length}; {name} was made for {model.max_positions} tokens, so choose from 2 to that."
        )
    platform = jax.default_backend()
    page_size = DEFAULT_PAGE_SIZE.get(platform, 64) if page_size is None else page_size
    if prefill_batch is None:
        prefill_batch = 512 if platform != "cpu" else 128 if max_num_seqs >= _MANY else 64
    for setting, value in (("max_num_seqs", max_num_seqs), ("page_size", page_size), ("prefill_batch", prefill_batch)):
        if value < 1:
            raise UsageError(f"{setting} is {value}; it must be at least 1.")
    if num_pages is not None and num_pages < 2:
        raise UsageError(f"num_pages is {num_pages}; it must be at least 2, for page 0 holds no text.")
    batch = max(2, max_num_seqs)  # one row alone is another program to the compiler, and a slower one
    num_slots = batch if max_resident_seqs is None else max_resident_seqs
    if num_slots < batch:
        raise UsageError(
            f"max_resident_seqs is {max_resident_seqs}; it must be at least the {batch} sequences that a step serves."
        )
    prefill_batch = _multiple(min(prefill_batch, length), page_size)
    chunk = _multiple(min(_CHUNK.get(platform, 128), prefill_batch), page_size)
    everything = num_slots * -(-length // page_size) + 1
    return DecoderConfig(
        model=model,
        num_slots=num_slots,
        batch=batch,
        page_size=page_size,
        num_pages=everything if num_pages is None else num_pages,
        max_length=length,
        prefill_batch=_multiple(prefill_batch, chunk),
        chunk=chunk,
        max_steps=_MAX_STEPS,
        cache_dtype=dtype,
        backend=serving_backend(model, page_size, dtype)[0] if backend is None else backend,
        num_logprobs=MAX_LOGPROBS,
        num_stop_ids=MAX_EOS_IDS + MAX_STOP_IDS,
        penalties=True,
        calibration=calibration,
        controller=controller(control),
    )


def _multiple(size: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
