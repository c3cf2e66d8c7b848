"""Make the files in tests/golden: small random models and what transformers computes from them.

Runs in an environment of its own, which holds torch and transformers and needs no et_jax:

    python scripts/make_golden.py tests/golden
    python scripts/make_golden.py tests/golden --greedy FOLDER   # also greedy texts of a real model
    python scripts/make_golden.py tests/golden --adapters        # LoRA adapters of the models there alone, with peft
"""

import argparse
import json
from pathlib import Path

import numpy as np
import safetensors.torch  # pyright: ignore[reportMissingImports]
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.integrations import mxfp4  # pyright: ignore[reportMissingImports]

LENGTH = 40  # tokens of a sequence: beyond the windows and the original lengths below


def rope(kind: str, **settings) -> dict:
    """Return the rotary settings of one kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


COMMON = {
    **{"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
}
GROUPED = COMMON | {"num_key_value_heads": 2}
TIED, WIDE, WINDOW = {"tie_word_embeddings": True}, {"head_dim": 16}, {"sliding_window": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
QWEN2_WINDOW = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
FAMILIES = {  # by name the class of the configuration, less "Config", and its settings
    "llama2": ("Llama", COMMON | TIED | {"num_key_value_heads": 4}),
    "llama_untied": ("Llama", GROUPED | {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", GROUPED | rope("llama3", **LLAMA3)),
    "llama_linear": ("Llama", GROUPED | rope("linear", factor=4.0)),
    "llama_yarn": ("Llama", GROUPED | WIDE | rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": ("Mistral", GROUPED | WINDOW),
    "qwen2": ("Qwen2", GROUPED | TIED | QWEN2_WINDOW),
    "qwen3": ("Qwen3", GROUPED | WIDE | {"num_hidden_layers": 3}),
}
GEMMA = GROUPED | WIDE | WINDOW | {"num_hidden_layers": 3, "query_pre_attn_scalar": 24}
GEMMA3 = GEMMA | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
LONG = {"short_factor": [1.0, 1.05, 1.1, 1.2], "long_factor": [1.0, 1.5, 2.5, 4.0], "partial_rotary_factor": 0.5}
PHI4 = {"num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": 32}
SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 0.8}
LATER = {
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "gemma3": ("Gemma3", {"text_config": GEMMA3, "vision_config": VISION | {"image_size": 16, "patch_size": 8}}),
    "smollm3": ("SmolLM3", GROUPED | {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", GROUPED),
    "phi3": ("Phi3", GROUPED | WINDOW | rope("default", partial_rotary_factor=1.0)),
    "phi4_mini": ("Phi3", GROUPED | PHI4 | TIED | rope("longrope", original_max_position_embeddings=32, **LONG)),
    "granite": ("Granite", GROUPED | SCALES | TIED),
}
MIXTRAL = GROUPED | {"intermediate_size": 24, "num_experts_per_tok": 2}
EXPERTS = GROUPED | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = {"num_hidden_layers": 3, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
SPARSE = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
MIXTURES = {
    "mixtral": ("Mixtral", MIXTRAL | {"num_local_experts": 6, "sliding_window": None}),
    "mixtral_window": ("Mixtral", MIXTRAL | {"num_local_experts": 4} | WINDOW),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | WIDE | SPARSE),
    "qwen3_moe_unnormalised": ("Qwen3Moe", EXPERTS | WIDE | {"norm_topk_prob": False}),
}
GPT_OSS = {
    **GROUPED | WIDE | WINDOW | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5},
    **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_slow=0.02, truncate=False),
}
SINKS = {"gpt_oss": ("GptOss", GPT_OSS), "gpt_oss_mxfp4": ("GptOss", GPT_OSS)}
PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her",
    "Tom and his dog went to the",
    "The big bear was sad because",
    '"Can I have a cookie?" Ben asked his',
)


def make_family(folder: Path, config_name: str, settings: dict, seed: int, num_prompts: int, small: bool) -> None:
    """Write one random model and its logits on random sequences, all float32 but experts that are `small`: MXFP4."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{config_name}Config")(**settings, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
            elif name.endswith("sinks"):
                weight.normal_(std=2.0)
            else:
                weight.normal_(std=0.2)
        packed = draw_mxfp4(model) if small else {}
        tokens = torch.randint(0, config.get_text_config().vocab_size, (num_prompts, LENGTH))
        logits = model(tokens).logits
    model.save_pretrained(folder)
    if packed:
        store_mxfp4(folder, packed)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "golden.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def draw_mxfp4(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Give the experts of a model random weights of 4 bits, and return what they are stored as, by tensor."""
    packed = {}
    for name, weight in model.named_parameters():
        if weight.ndim == 3:
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
            weight.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def store_mxfp4(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    """Put the tensors of experts of 4 bits in the place of those that a folder holds."""
    file, config = folder / "model.safetensors", folder / "config.json"
    wide = {name.removesuffix("_blocks") for name in packed}
    tensors = {name: one for name, one in safetensors.torch.load_file(file).items() if name not in wide}
    safetensors.torch.save_file(tensors | packed, file, metadata={"format": "pt"})
    values = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(values, indent=2) + "\n")


def make_greedy(file: Path, folder: Path, num_tokens: int = 200) -> None:
    """Write the greedy continuations of the model in `folder`: at most `num_tokens`, or to its end token."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        output = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)[0, len(ids) :].tolist()
        stopped = output[-1] == model.config.eos_token_id
        text = tokenizer.decode(output[:-1] if stopped else output)
        rows.append({"prompt": prompt, "prompt_ids": ids, "ids": output, "text": text, "stopped": stopped})
    file.write_text(json.dumps(rows, indent=1) + "\n")


ADAPTERS = {  # of golden models, by name, what peft is told
    "llama_untied": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "lm_head"]},
    "qwen2": {
        **{"r": 3, "lora_alpha": 6, "use_rslora": True, "target_modules": r".*\.(k_proj|o_proj|up_proj|down_proj)"},
        **{"rank_pattern": {"o_proj": 5, r"layers\.1\..*up_proj": 2}, "alpha_pattern": {r"\d\.mlp\.down_proj": 1.5}},
    },
    "qwen3": {
        **{"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0, 2]},
        "exclude_modules": ["layers.2.mlp.gate_proj"],
    },
    "phi3": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"},
    "gemma3": {"r": 4, "lora_alpha": 8, "target_modules": r".*language_model.*\.(q_proj|down_proj)"},
}


def make_adapter(folder: Path, settings: dict) -> None:
    """Write a random adapter of a golden model, as peft saves it, and the logits of the model with it, not merged."""
    import peft  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2)
        logits = adapted(torch.from_numpy(np.load(folder / "golden.npz")["tokens"]).long()).logits
    adapted.save_pretrained(folder / "lora", save_embedding_layers=False)
    (folder / "lora" / "README.md").unlink()
    np.savez(folder / "lora" / "golden.npz", logits=logits.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the golden files")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families to write (default: all)")
    parser.add_argument("--greedy", type=Path, metavar="FOLDER", help="model to write greedy texts of")
    parser.add_argument("--adapters", action="store_true", help="write the adapters of the models that are there")
    arguments = parser.parse_args()
    if arguments.adapters:
        for name, settings in ADAPTERS.items():
            make_adapter(arguments.out / name, settings)
        return
    for table, first in ((FAMILIES | LATER, 0), (MIXTURES, 100), (SINKS, 200)):
        for seed, (name, (config_name, settings)) in enumerate(table.items(), first):
            if arguments.only is None or name in arguments.only:
                num_prompts = 1 if name in FAMILIES else 3
                make_family(arguments.out / name, config_name, settings, seed, num_prompts, name.endswith("mxfp4"))
    if arguments.greedy:
        make_greedy(arguments.out / f"{arguments.greedy.name}.json", arguments.greedy)


if __name__ == "__main__":
    main()
