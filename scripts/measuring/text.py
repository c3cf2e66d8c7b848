"""Text to measure on, as rows of token ids: works held out from the bundled model's training, or a file of stories."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.errors import UsageError
from et_jax.io.texts import read_text
from et_jax.models.model import forward
from et_jax.serve.engine import Model
from et_jax.softmax import Softmax
from et_jax.tasks.calibration import require_plain_attention
from et_jax.training import corpus


def texts(path: Path) -> list[str]:
    """Return the held-out works of a tar archive of works, or the stories of a file, a line break between two.

    Within a story paragraphs are parted by an empty line. Raises UsageError where the file cannot be read.
    """
    if ".tar" in path.suffixes:
        works = corpus.read_works(path)
        return [works[name] for name in corpus.split(works)[1]]
    return [story for story in re.split(r"(?<!\n)\n(?!\n)", read_text(path, "The text")) if story]


def rows(model: Model, path: Path, count: int, length: int) -> Int[np.ndarray, "r t"]:
    """Return `count` rows of `length` tokens, evenly spaced over the texts of a file end to end.

    Every text, and every row, begins with what the model's tokenizer puts before a text.
    """
    parts = [model.tokenizer.encode(text) for text in texts(path)]
    stream = np.concatenate([np.array(part, np.int32) for part in parts])
    if len(stream) < count * length:
        raise UsageError(f"{path} has {len(stream)} tokens and {count} rows of {length} were asked for; ask for fewer.")
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    found = stream[starts[:, None] + np.arange(length)]
    found[:, 0] = parts[0][0]
    return found


def causal_attend(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
    """Return plain causal attention over the window itself."""
    return jax.nn.dot_product_attention(q, k, v, scale=softmax.scale, is_causal=True), memory


def held_out_logits(model: Model, tokens: Int[np.ndarray, "r t"]) -> tuple[Float[Array, "n v"], Int[Array, " n"]]:
    """Return logits and targets of the second half of every row, where the model has context.

    Raises ValueError for a model with sliding windows, soft caps or sinks.
    """
    require_plain_attention(model.config)
    length = tokens.shape[1] - 1
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def logits_of(row: Array) -> Array:
        return forward(model.params, model.config, row[None], positions, causal_attend, None)[0][0, length // 2 :]

    logits = jnp.concatenate([logits_of(row) for row in tokens[:, :-1]])
    return logits, jnp.asarray(tokens[:, 1 + length // 2 :].reshape(-1))
