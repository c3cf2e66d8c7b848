"""From training weights to a Hugging Face folder: bfloat16 weights, configuration, tokenizer."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from et_jax.io.files import replace_file
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.training.corpus import END_OF_TEXT
from et_jax.training.loss import unstack


def export(params: Params, config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> int:
    """Write stacked `params` and the files of the model except the model card; return their size in bytes."""
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), unstack(params))
    write_hugging_face(folder, config, weights)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _write(folder / "generation_config.json", ends | {"do_sample": True, "temperature": 0.8, "top_p": 0.95})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
        },
    )
    return sum(file.stat().st_size for file in folder.iterdir())


def _write(path: Path, values: dict[str, object]) -> None:
    replace_file(path, json.dumps(values, indent=2) + "\n")
