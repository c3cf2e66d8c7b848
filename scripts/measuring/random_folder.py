"""A model folder of random weights, in the shape of a model that is too large to come along."""

import json
import shutil
from pathlib import Path

import jax
from jax.typing import DTypeLike

from et_jax.models.bundled import bundled_folder
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise


def random_folder(path: Path, config: ModelConfig, dtype: DTypeLike) -> Path:
    """Return `path` with random weights of a shape, and a tokenizer for it.

    That is the bundled one, with tokens that no text has for the rest of the vocabulary.
    """
    write_hugging_face(path, config, initialise(config, jax.random.key(0), dtype))
    shutil.copy(bundled_folder() / "tokenizer_config.json", path)
    tokenizer = json.loads((bundled_folder() / "tokenizer.json").read_text())
    known = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    unknown = sorted({*range(config.vocab_size)} - known)
    tokenizer["model"]["vocab"] |= {f"<unused {number}>": number for number in unknown}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path
