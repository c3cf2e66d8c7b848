"""The sizes of small runs, and what they leave."""

import dataclasses
import json

from et_jax.training import corpus, loop
from et_jax.training.schedule import Schedule
from scripts.measuring.shapes import SMALL

VOCAB, WINDOW = 300, 32  # novels alone
SCHEDULE = Schedule(warmup=2, short_length=8, long_length=32)
MIXED_VOCAB, MIXED_WINDOW = 4096, 256  # with tasks


def model(vocab_size, window):
    ends = {"bos_token_id": corpus.END_ID, "eos_token_ids": (corpus.END_ID,)}
    return dataclasses.replace(SMALL, vocab_size=vocab_size, max_positions=window, tie_embeddings=True, **ends)


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    """The loss of each step, the last one logged where a step was done twice."""
    return {record["step"]: record["loss"] for record in log(folder)}


def run(settings, data, folder, steps, start=None):
    tokenizer, train, held_out = data
    return loop.train(settings, train, held_out, folder, steps, None, tokenizer=tokenizer, start=start)
