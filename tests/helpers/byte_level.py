"""A small random model with a byte-level tokenizer, as a Hugging Face folder."""

import dataclasses
from pathlib import Path

import jax
import tokenizers

from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.transformer import initialise
from scripts.measuring.shapes import SMALL


def byte_level_folder(path: Path, seed: int = 0) -> Path:
    """Write the model, its weights drawn by the seed, and return its folder."""
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<end>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    byte_level.train_from_iterator([], trainer)
    config = dataclasses.replace(SMALL, vocab_size=byte_level.get_vocab_size(), eos_token_ids=(0,))
    write_hugging_face(path, config, initialise(config, jax.random.key(seed)))
    byte_level.save(str(path / "tokenizer.json"))
    return path
