"""Completions as arrays of one shape for a trainer, and the log-probabilities that it differentiates."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.errors import UsageError
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.models.transformer import forward
from et_jax.serve.completions import Completion
from et_jax.training.loss import causal_attend


class Rollouts(NamedTuple):
    """Prompts and continuations, padded with token 0.

    `generated` is True at the tokens of continuations. `log_probs` and `entropies`, in nats, are those of the model's
    own distribution at temperature 1 from which each of these tokens was drawn; 0 elsewhere.
    """

    tokens: Int[np.ndarray, "n t"]
    generated: Bool[np.ndarray, "n t"]
    log_probs: Float[np.ndarray, "n t"]
    entropies: Float[np.ndarray, "n t"]


def rollouts(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], length: int | None = None
) -> Rollouts:
    """Return completions as arrays, with the token ids of the prompt of each.

    Rows have `length` tokens, by default as many as the longest. Raises UsageError if one is longer, if a completion
    has an error, or if there are not as many prompts.
    """
    if len(prompts) != len(completions):
        raise UsageError(f"There are {len(prompts)} prompts and {len(completions)} completions; give one for each.")
    rows = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, completions, strict=True)]
    longest = max(map(len, rows), default=0)
    if length is not None and longest > length:
        raise UsageError(f"length is {length}; the longest prompt and continuation have {longest} tokens.")
    if failed := [one.error for one in completions if one.error is not None]:
        raise UsageError(f"A completion failed, so there is nothing to train on: {failed[0]}")
    shape = len(rows), longest if length is None else length
    found = Rollouts(np.zeros(shape, np.int32), np.zeros(shape, bool), *np.zeros((2, *shape), np.float32))
    for i, (row, prompt, one) in enumerate(zip(rows, prompts, completions, strict=True)):
        new = slice(len(prompt), len(row))
        found.tokens[i, : len(row)] = row
        found.generated[i, new] = True
        found.log_probs[i, new] = one.logprobs
        found.entropies[i, new] = [step.entropy for step in one.trace]
    return found


@partial(jax.jit, static_argnames="config")
def log_probs(params: Params, config: ModelConfig, tokens: Int[Array, "n t"]) -> Float[Array, "n t"]:
    """Return the log-probability of each token after those before it, in nats, 0 for the first; differentiable."""
    inputs = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    logits, _ = forward(params, config, inputs, positions, causal_attend, None)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))
