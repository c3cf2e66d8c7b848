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

LENGTH, ROWS = 128, 4  # tokens of prompt and completion, sequences in a batch
_END = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA = dataclasses.replace(
    SMALL,
    **{"vocab_size": 4096, "bos_token_id": 0, "eos_token_ids": (0,)},  # the bundled tokenizer's
    **{"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "max_positions": 256, "tie_embeddings": True},
)
EXPERTS = ExpertConfig(num_experts=4, num_per_token=2, width=48, normalised=True, layers=(True, True))
_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, truncate=False)
_CLAMPED = ClampedSwish(alpha=1.702, limit=7.0)
GPT_OSS = dataclasses.replace(
    LLAMA,
    **{"architecture": "gpt_oss", "hidden_size": 32, "intermediate_size": 32, "windows": (16, None)},
    **{"rope_scaling": _YARN, "qkv_bias": True, "o_bias": True, "sinks": True},
    experts=dataclasses.replace(EXPERTS, width=32, biases=True, activation=_CLAMPED),
)


def random_weights(config: ModelConfig, *, packed: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights by name, large enough that another sequence's tokens would change the output.

    `packed`: those of three axes, [expert, in, out], as random numbers of MXFP4.
    """
    random, tensors = np.random.default_rng(0), {}
    for name, shape in tensor_shapes(sources_of(config)).items():
        if packed and len(shape) == 3:
            e, i, o = shape
            tensors[f"{name}_blocks"] = random.integers(0, 256, (e, o, i // 32, 16), np.uint8)
            tensors[f"{name}_scales"] = random.integers(121, 125, (e, o, i // 32), np.uint8)
        else:
            drawn = 0.3 * random.normal(size=shape) if len(shape) > 1 else np.ones(shape)
            tensors[name] = drawn.astype(np.float32)
    return tensors


def write_model(folder: Path, config: ModelConfig = LLAMA, *, packed: bool = False) -> Path:
    """Write a model of random weights, its experts `packed` or not, with the bundled tokenizer; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config, packed=packed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    quantization = {"quantization_config": {"quant_method": "mxfp4"}} if packed else {}
    settings = json.loads((bundled_folder() / "tokenizer_config.json").read_text())
    documents = {
        "config.json": config_to_hugging_face(config) | {"torch_dtype": "float32"} | quantization,
        "tokenizer_config.json": settings | {"chat_template": TEMPLATE},
        "special_tokens_map.json": {"bos_token": _END, "eos_token": {"content": _END, "lstrip": False}},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2))
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
    """Make `folder` the files of `base`, linked, except those changed or (None) absent; a name in "/" is a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))
    for name, data in changes.items():
        (folder / name).unlink(missing_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir()
        elif data is not None:
            (folder / name).write_bytes(data)
    return folder
