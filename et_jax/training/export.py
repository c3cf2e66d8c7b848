"""From a checkpoint to a Hugging Face folder: weights in bfloat16, configuration, tokenizer."""

import json
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array
from safetensors.flax import save_file
from tokenizers import Tokenizer

from et_jax.models.config import ModelConfig
from et_jax.models.transformer import Params
from et_jax.training.corpus import END_OF_TEXT
from et_jax.training.loss import unstack

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hugging_face_tensors(params: Params, config: ModelConfig) -> dict[str, Array]:
    """Return the weights of stacked `params` under their Hugging Face names, bfloat16; the tied head has none."""
    named = {"model.embed_tokens.weight": params.embedding, "model.norm.weight": params.final_norm}
    for index, layer in enumerate(unstack(params, config.num_layers).layers):
        named |= {f"model.layers.{index}.{name}.weight": getattr(layer, field) for field, name in LAYER_NAMES.items()}
    return {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in named.items()}


def hugging_face_config(config: ModelConfig) -> dict[str, object]:
    """Return the `config.json` of a tied Llama-shaped model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "use_cache": True,
    }


def export(params: Params, config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> int:
    """Write the Hugging Face folder, all but its model card, and return the bytes it takes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_tensors(params, config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    _write(folder / "config.json", hugging_face_config(config))
    _write(folder / "generation_config.json", ends | {"do_sample": True, "temperature": 0.8, "top_p": 0.95})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
        },
    )
    return sum(file.stat().st_size for file in folder.iterdir())


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
