"""Small model folders with random weights, and the model that runs a worker's cases."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from et_jax.models.bundled import bundled_folder
from et_jax.models.checkpoint import sources_of
from et_jax.models.config import ClampedSwish, ExpertConfig, ModelConfig, RopeScaling
from et_jax.models.families.registry import config_to_hugging_face
from et_jax.models.sources import tensor_shapes
from et_jax.serve.engine import Model, load
from scripts.measuring.shapes import SMALL

LENGTH, ROWS = 128, 4  # tokens of prompt and text, and sequences decoded together
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA = dataclasses.replace(
    SMALL,
    vocab_size=4096,  # the bundled tokenizer's
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    max_positions=256,
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)
GPT_OSS = dataclasses.replace(
    LLAMA,
    architecture="gpt_oss",
    hidden_size=32,
    intermediate_size=32,
    windows=(16, None),
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, truncate=False),
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    experts=ExpertConfig(
        num_experts=4,
        num_per_token=2,
        width=32,
        normalised=True,
        layers=(True, True),
        biases=True,
        activation=ClampedSwish(alpha=1.702, limit=7.0),
    ),
)


def random_weights(config: ModelConfig) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return weights by name, large enough that a neighbour's tokens would show in a text."""
    random = np.random.default_rng(0)
    shapes = tensor_shapes(sources_of(config))

    def drawn(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return 0.3 * random.normal(size=shape) if len(shape) > 1 else np.ones(shape)

    return {name: drawn(shape).astype(np.float32) for name, shape in shapes.items()}


def packed_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model with those of three axes, [expert, in, out], as random numbers of MXFP4."""
    random, tensors = np.random.default_rng(0), {}
    for name, tensor in weights.items():
        if tensor.ndim != 3:
            tensors[name] = tensor
            continue
        e, i, o = tensor.shape
        tensors[f"{name}_blocks"] = random.integers(0, 256, (e, o, i // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(121, 125, (e, o, i // 32), np.uint8)
    return tensors


def write_model(folder: Path, config: ModelConfig = LLAMA, *, packed: bool = False) -> Path:
    """Write a model of random weights with the bundled tokenizer, its experts `packed` or not; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config)
    save_file(packed_experts(weights) if packed else weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = config_to_hugging_face(config) | {"torch_dtype": "float32"}
    if packed:
        values |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    settings = json.loads((bundled_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}, indent=2))
    special = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    return folder


def open_model(folder: Path, **settings: Any) -> Model:
    """Load a model as cases do."""
    return load(str(folder), **{"max_model_len": LENGTH, "max_num_seqs": ROWS} | settings)


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
