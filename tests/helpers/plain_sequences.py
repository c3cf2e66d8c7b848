"""Sequences and measured tokens for tests that need no model, only its tokenizer."""

import functools

from et_jax.control.controller import Controller
from et_jax.models.bundled import bundled_folder
from et_jax.serve.completions import TokenTrace
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.sequence import Sequence, Text
from et_jax.text import Tokenizer, load_tokenizer


@functools.cache
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return load_tokenizer(bundled_folder())


def sequence(prompt_ids: list[int], *, limit: int = 8, priority: float = 0.0, **params) -> Sequence:
    """A sequence that has not been submitted."""
    asked = SamplingParams(**{"max_tokens": limit} | params)
    return Sequence(
        request=GenerationRequest(prompt=tuple(prompt_ids), params=asked, priority=priority),
        laws=Controller(),
        prompt=tokenizer().decode(prompt_ids),
        prompt_ids=prompt_ids,
        prompt_index=3,
        index=1,
        limit=limit,
        stop_ids=(*asked.stop_token_ids, *tokenizer().eos_ids),
        text=Text(tokenizer(), asked.stop),
    )


def row(token: int, **figures) -> TokenTrace:
    """A token as a step hands it over, without its text."""
    plain = dict(entropy=1.0, varentropy=1.0, temperature=1.0, surprisal=0.5, blocks_read=1, blocks_held=2)
    plain |= dict(kept_mass=1.0, entropic_time=0.0, cost=3.0, flops=5.0)
    return TokenTrace(**{"token": token, "text": ""} | plain | figures)
