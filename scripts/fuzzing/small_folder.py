"""Small model folders with random weights, and the model that serves a worker's cases."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.engine import Model, load
from et_jax.models.bundled import bundled_folder
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise

LENGTH, ROWS = 128, 4  # tokens of prompt and text, and sequences decoded together
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=4096,  # the bundled tokenizer's
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=256,
    norm_eps=1e-5,
    rope_theta=10000.0,
    windows=(None, None),
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)


def write_model(folder: Path, config: ModelConfig = LLAMA) -> Path:
    """Write a model of random weights with the bundled tokenizer, and return its folder."""
    weights = initialise(config, jax.random.key(0), jnp.float32)
    write_hugging_face(folder, config, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, weights))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    settings = json.loads((bundled_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}, indent=2))
    special = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    return folder


def open_model(folder: Path, **settings: Any) -> Model:
    """Load a model as cases do, its programs kept for the workers that follow."""
    plain: dict[str, Any] = {"max_model_len": LENGTH, "max_num_seqs": ROWS}
    return load(str(folder), **plain | settings, compilation_cache=Path("~/.cache/et_jax/programs").expanduser())


def served_model(folder: Path) -> Model:
    """Return a model that is ready to serve."""
    model = open_model(write_model(folder))
    model.warm_up()
    model.generate("Once", max_tokens=2)
    return model


def overlay(folder: Path, base: Path, changes: dict[str, bytes | None]) -> Path:
    """Make `folder` the files of `base`, linked, but for those changed or (None) absent."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))
    for name, data in changes.items():
        (folder / name).unlink(missing_ok=True)
        if data is not None:
            (folder / name).write_bytes(data)
    return folder
