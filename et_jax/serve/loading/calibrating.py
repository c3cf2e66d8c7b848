"""Calibrates a model on text: measures its sensitivity to each query head on rows of tokens."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from et_jax.errors import UsageError
from et_jax.io.texts import read_text
from et_jax.models.adapters import read_adapter
from et_jax.models.calibration import TEXT, Calibration, as_kept
from et_jax.models.checkpoint import load
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.model import ModelWeights, dtype_of, weight_bytes
from et_jax.models.sensitivity import head_sensitivity
from et_jax.text import Tokenizer

ROWS, LENGTH = 6, 512
_DRAWS = 2
_ROOM = 3  # times the weights: the weights, a copy in another layout, and gradients


def rows(tokenizer: Tokenizer, texts: Sequence[str], name: str, count: int, length: int) -> Int[np.ndarray, "r t"]:
    """Return `count` rows of `length` tokens, evenly spaced over the concatenated texts, which errors call `name`.

    Every text, and every row, begins with the tokenizer's begin token. Raises UsageError if the texts have too few
    tokens.
    """
    parts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    stream = np.concatenate(parts)
    if len(stream) < count * length:
        raise UsageError(f"{name} has {len(stream)} tokens and {count} rows of {length} were asked for; ask for fewer.")
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    found = stream[starts[:, None] + np.arange(length)]
    found[:, 0] = parts[0][0]
    return found


def default_rows(tokenizer: Tokenizer, model: ModelShape) -> Int[np.ndarray, "r t"]:
    """Return the default rows for a calibration: as many as the package's text has, at most `ROWS`.

    They have `LENGTH` tokens, or the model's context length if it is shorter.
    """
    text, length = read_text(TEXT, "The text"), min(LENGTH, model.max_positions)
    count = max(1, min(ROWS, len(tokenizer.encode(text)) // length))
    return rows(tokenizer, [text], TEXT.name, count, length)


def floats(folder: Path, model: ModelConfig, dtype: str, memory: int, adapter: Path | None = None) -> ModelWeights:
    """Return the weights for a calibration: in float32 if they fit into `memory`, otherwise in `dtype`."""
    wide = _ROOM * weight_bytes(model, jnp.float32) <= memory
    added = None if adapter is None else read_adapter(adapter, model).added
    return load(folder, "float32" if wide else dtype, added=added)[1]


def measured(
    name: str, model: ModelShape, params: ModelWeights, tokens: Int[np.ndarray, "r t"], report: Callable[[str], None]
) -> Float[np.ndarray, "l k g"]:
    """Return the sensitivity to each head over the second halves of rows; `report` receives the progress."""
    began, what = time.perf_counter(), f"measuring how sensitive {name} is to each of its heads"

    def progress(done: int) -> None:
        spent = time.perf_counter() - began
        left = spent / done * (len(tokens) - done)
        report(f"{what}: row {done} of {len(tokens)}, {spent:.0f} s so far, about {left:.0f} s left")

    report(f"{what}: {len(tokens)} rows of {tokens.shape[1]} tokens")
    return head_sensitivity(model, params, tokens, tokens.shape[1] // 2, _DRAWS, progress=progress)


def facts(name: str, text: str, params: ModelWeights, tokens: Int[np.ndarray, "r t"]) -> dict[str, Any]:
    """Return the provenance of a calibration, as its file records it."""
    counted = len(tokens) * (tokens.shape[1] - tokens.shape[1] // 2)
    about = {
        "model": Path(name).name,
        "text": text,
        "rows": len(tokens),
        "row_tokens": tokens.shape[1],
        "tokens": counted,
    }
    return about | {"dtype": str(dtype_of(params))}


def measured_at_load(
    name: str, model: ModelShape, params: ModelWeights, tokenizer: Tokenizer, report: Callable[[str], None]
) -> tuple[Calibration, dict[str, Any]]:
    """Return a model's sensitivity on the package's own text, at temperature 1, and its provenance."""
    tokens = default_rows(tokenizer, model)
    table = as_kept(measured(name, model, params, tokens, report))
    return Calibration(sensitivity=table), facts(name, TEXT.name, params, tokens)
