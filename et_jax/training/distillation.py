"""A teacher model: loading and checks, the student's initial embedding, and the agreement of a student with it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tokenizers import Tokenizer

from et_jax.errors import UsageError
from et_jax.models import checkpoint
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.models.weights import Dense
from et_jax.training import corpus, loss
from et_jax.training.settings import Settings
from et_jax.types import pytree, replace, static

FIRST_NORM = 0.3  # of a student: after 120 steps its loss was lower than with 0.1, or from random weights


@pytree
class Teacher:
    """A teacher model: its shape and its stacked weights, bfloat16."""

    config: ModelConfig = static()
    params: Params


def read_teacher(folder: Path, settings: Settings) -> tuple[Teacher, Tokenizer]:
    """Return the model in `folder` as the teacher of a run with these settings, and its tokenizer.

    Raises UsageError for one of another vocabulary or a shorter context, or that the training cannot run.
    """
    config, params = checkpoint.load(folder)
    if config.vocab_size != settings.model.vocab_size:
        raise UsageError(
            f"The teacher {folder} has {config.vocab_size} tokens and the student {settings.model.vocab_size}; "
            "choose a teacher with the same vocabulary."
        )
    if config.max_positions < settings.window:
        raise UsageError(
            f"The teacher {folder} reads {config.max_positions} tokens and the longest rows are {settings.window}; "
            "choose a teacher with a context as long."
        )
    if not config.tie_embeddings or not loss.is_plain(config):
        raise UsageError(
            f"The teacher {folder} has a head of its own, soft caps or a divisor of its logits; choose one without."
        )
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return Teacher(config=config, params=loss.stack(cast, config)), corpus.read_tokenizer(folder)


def check_tokens(taught: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise UsageError if a run's tokens are not those of its teacher."""
    if taught.to_str() != tokenizer.to_str():
        raise UsageError("The run's tokens are of another tokenizer than the teacher's; choose another folder for it.")


def projected(params: Params, teacher: Teacher) -> Params:
    """Return stacked `params` with the embedding that best approximates the teacher's in its width.

    It consists of the first principal directions of the teacher's embedding times its final norm, which yields logits.
    The student's own norm begins small: its residual stream begins as the input token, and without the layers' output
    it would predict that token again with certainty.
    """
    width = params.embedding.shape[1]
    taught = np.asarray(teacher.params.embedding.array, np.float64) * np.asarray(teacher.params.final_norm, np.float64)
    left, sizes, _ = np.linalg.svd(taught, full_matrices=False)
    embedding = jnp.asarray(left[:, :width] * sizes[:width], jnp.float32)
    return replace(params, embedding=Dense(array=embedding), final_norm=params.final_norm * FIRST_NORM)


NEARNESS = ("divergence", "overlap", "greedy")


@pytree
class Agreement:
    """The agreement of a student with its teacher at every position.

    `divergence` is KL(teacher || student), nats; `overlap` is the sum of min(p, q), the acceptance rate of the
    student's drafts in speculative decoding; `greedy` is one if both have the same likeliest token.
    """

    divergence: Float[Array | np.ndarray, "b t"]
    overlap: Float[Array | np.ndarray, "b t"]
    greedy: Float[Array | np.ndarray, "b t"]


@functools.partial(jax.jit, static_argnames="config")
def _agreement(params: Params, config: ModelConfig, teacher: Teacher, inputs: Array) -> tuple[Array, Array, Array]:
    states = [loss.hidden_states(*model, inputs) for model in ((params, config), (teacher.params, teacher.config))]
    weights = [model.embedding.array.astype(jnp.bfloat16) for model in (params, teacher.params)]

    def body(rows: tuple[Array, ...]) -> tuple[Array, ...]:
        log_q, log_p = (loss.log_probabilities(*pair) for pair in zip(weights, rows, strict=True))
        p = jnp.exp(log_p)
        same = log_p.argmax(axis=-1) == log_q.argmax(axis=-1)
        overlap = jnp.minimum(p, jnp.exp(log_q)).sum(axis=-1)
        return (p * (log_p - log_q)).sum(axis=-1), overlap, same.astype(jnp.float32)

    found = jax.lax.map(body, loss.in_chunks(*(x.reshape(-1, x.shape[-1]) for x in states)))
    divergence, overlap, greedy = (part.reshape(inputs.shape) for part in found)
    return divergence, overlap, greedy


def agreement(
    params: Params, settings: Settings, teacher: Teacher, rows: corpus.Rows, batch_tokens: int = 8192
) -> Agreement:
    """Return the agreement of stacked `params` with the teacher at every position of `rows`, zero outside the mask."""
    size = max(1, batch_tokens // rows.inputs.shape[1])
    parts = []
    for begin in range(0, len(rows.inputs), size):
        inputs = np.pad(rows.inputs, ((0, max(0, begin + size - len(rows.inputs))), (0, 0)))[begin : begin + size]
        parts.append(_agreement(params, settings.model, teacher, inputs))
    found = [
        np.where(rows.target_mask, np.concatenate([np.asarray(y) for y in part])[: len(rows.inputs)], 0.0)
        for part in zip(*parts, strict=True)
    ]
    return Agreement(**dict(zip(NEARNESS, found, strict=True)))
