"""Models to measure on, as shapes, and folders of them with weights drawn at random."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import Calibration
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise
from et_jax.types import Table

# Two layers that compile in a moment, with two query heads on each KV head.
SMALL = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    windows=(None, None),
)
# Allal et al. 2024
SMOLLM_135M = ModelConfig(
    architecture="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=2048,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    windows=(None,) * 30,
    tie_embeddings=True,
)
# Grattafiori et al. 2024
LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    windows=(None,) * 32,
)
SHAPES = {
    "small": dataclasses.replace(SMALL, vocab_size=4096),  # as many as the bundled tokenizer has
    "smollm-135m": SMOLLM_135M,
    "llama-3-8b": LLAMA_3_8B,
}


def even_heads(model: ModelConfig) -> Calibration:
    """Return a calibration by which a model is as sensitive to each of its heads."""
    shape = model.num_layers, model.num_kv_heads, model.group_size
    return Calibration(sensitivity=Table(np.ones(shape, np.float32)))


def random_folder(path: Path, config: ModelConfig, dtype: DTypeLike) -> Path:
    """Return `path`, a model folder with random weights of a shape, and a tokenizer for it.

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
