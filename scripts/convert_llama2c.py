"""Turn a llama2.c checkpoint and its tokenizer into a Hugging Face folder.

python scripts/convert_llama2c.py stories260K.bin tok512.bin OUT_FOLDER
"""

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from et_jax.errors import UsageError
from et_jax.io.schema import MAX_LAYERS, MAX_TOKENIZER_BYTES, check_regular, read_bytes
from et_jax.models.checkpoint import assemble, sources_of, write_hugging_face
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params, num_weights
from et_jax.models.sources import tensor_shapes
from et_jax.text.backends import other_format

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2 whatever the file calls them; byte pieces follow
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PIECES = len(SPECIAL + BYTES)  # the first id that is a piece of text
LAYER_ORDER = (  # llama2.c stores each kind of weight for all layers at once, in this order
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"),
)


def read_model(file: Path) -> tuple[ModelConfig, Params]:
    """Return what a legacy llama2.c file holds. Raises UsageError if its length is not what its header says."""
    check_regular(file)
    content = file.read_bytes()
    if known := other_format(content):
        raise UsageError(f"{file} is {known}, not a model in llama2.c's legacy format.")
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", content[:28].ljust(28, b"\0"))
    sizes = (dim, hidden, layers, heads, kv_heads, abs(vocab), length)
    if min(sizes) < 1 or max(sizes) > len(content) or layers > MAX_LAYERS or dim % (2 * heads) or heads % kv_heads:
        raise UsageError(f"{file} is no llama2.c model in the legacy format, version 0: its header makes no sense.")
    config = ModelConfig(
        architecture="llama",
        vocab_size=abs(vocab),
        hidden_size=dim,
        intermediate_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim // heads,
        max_positions=length,
        norm_eps=1e-5,  # llama2.c's own constants
        rope_theta=10000.0,
        windows=(None,) * layers,
        tie_embeddings=vocab > 0,
        bos_token_id=1,
        eos_token_ids=(1, 2),  # a story is followed by the next one's beginning, which is where llama2.c stops
    )
    rotary = length * config.head_dim  # two tables of cosines and sines, unused
    expected = 28 + 4 * (num_weights(config) + rotary)
    if len(content) != expected:
        raise UsageError(f"{file} has {len(content)} bytes but its header calls for {expected}; fetch it again.")
    shapes, numbers, weights = tensor_shapes(sources_of(config)), np.frombuffer(content, "<f4", offset=28), {}
    names = [f"model.layers.{layer}.{kind}.weight" for kind in LAYER_ORDER for layer in range(layers)]
    for name in ["model.embed_tokens.weight", *names, "model.norm.weight"]:
        size = int(np.prod(shapes[name]))
        weight, numbers = numbers[:size].reshape(shapes[name]), numbers[size:]
        paired = name.endswith(("q_proj.weight", "k_proj.weight"))
        weights[name] = half_split(weight, config.head_dim) if paired else weight
    if not config.tie_embeddings:
        weights["lm_head.weight"] = numbers[rotary:].reshape(shapes["lm_head.weight"])
    return config, assemble(config, weights)


def half_split(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return a query or key matrix whose rotary pairs are channels i and i + d/2; llama2.c pairs 2i and 2i + 1."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(weight.shape)


def read_pieces(file: Path) -> dict[str, float]:
    """Return the pieces of a llama2.c tokenizer with their scores. Raises UsageError for another format."""
    content, pieces = read_bytes(file, MAX_TOKENIZER_BYTES), {}
    if known := other_format(content):
        raise UsageError(f"{file} is {known}, not a tokenizer in llama2.c's format; export it with llama2.c first.")
    offset = 4  # the length of the longest piece comes first, which is not needed
    while offset + 8 <= len(content):
        score, length = struct.unpack_from("<fi", content, offset)
        if not math.isfinite(score) or not 0 <= length <= len(content) - offset - 8:
            break
        pieces[content[offset + 8 : offset + 8 + length].decode("utf-8", errors="replace")] = score
        offset += 8 + length
    if offset != len(content):
        raise UsageError(
            f"{file} is not a tokenizer in llama2.c's format, or cut: after {len(pieces)} pieces there is none; "
            "use the file that came with the model."
        )
    return pieces


def read_tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer that encodes as llama2.c does with this file.

    llama2.c joins, again and again, the two neighbours whose union has the best score: a byte-pair encoding
    whose merges are the splits of all pieces, best score first. Spaces stay spaces in the vocabulary. A text
    that spells a special token is read as that token, as is the custom of Hugging Face files. Raises
    UsageError for another format, and for a file whose first pieces are not the special tokens and the bytes.
    """
    scores = read_pieces(file)
    pieces = list(scores)
    if len(pieces) != vocab_size:
        raise UsageError(
            f"{file} has {len(pieces)} different pieces but the model {vocab_size} tokens; use the model's own file."
        )
    if tuple(pieces[len(SPECIAL) : PIECES]) != BYTES:
        raise UsageError(f"{file} has no piece for every byte after {len(SPECIAL)} others; it cannot be converted.")
    texts = pieces[PIECES:]
    known = set(texts)
    vocab = {name: id for id, name in enumerate((*SPECIAL, *BYTES, *texts))}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(texts, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def convert(model_file: Path, tokenizer_file: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder`."""
    config, params = read_model(model_file)
    tokenizer = read_tokenizer(tokenizer_file, config.vocab_size)
    write_hugging_face(folder, config, params)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the weights in llama2.c's legacy format")
    parser.add_argument("tokenizer", type=Path, help="the tokenizer in llama2.c's format")
    parser.add_argument("folder", type=Path, help="where to write the Hugging Face files")
    arguments = parser.parse_args()
    try:
        convert(arguments.model, arguments.tokenizer, arguments.folder)
    except (UsageError, OSError) as error:
        sys.exit(f"convert_llama2c: {error}")


if __name__ == "__main__":
    main()
