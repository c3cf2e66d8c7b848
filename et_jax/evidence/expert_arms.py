"""A mixture of experts run over given text, a token at a time, its experts as many as a rule says or as it is told.

As where it decodes, the first tokens of a row are read as trained, and a rule sees the entropy of the prediction before
the token, which itself was made with the experts that the rule gave to the tokens before it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.control import entropy
from et_jax.control.experts import ExpertRule
from et_jax.models.config import ModelConfig
from et_jax.models.experts import Experts, choose, gate, mixed
from et_jax.models.params import Params
from et_jax.models.transformer import forward
from et_jax.softmax import Softmax
from et_jax.types import pytree


@pytree
class Taken:
    """What every measured token of every row gave, in a step that of every row.

    `loss`: of the token that follows, nats. `entropy`: what a rule saw, nats, infinite at the first token. `expert`:
    the experts that the token went to in every mixture, as in `Choice`.
    """

    loss: Float[Array, "r *m"]
    entropy: Float[Array, "r *m"]
    expert: Int[Array, "r *m l c"]


@partial(jax.jit, static_argnames=("config", "start"))
def run(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "r t"],
    taking: ExpertRule | Int[Array | np.ndarray, "r m l"],
    *,
    start: int,
) -> Taken:
    """Return what rows of text gave from token `start` on, with experts by a rule, or as many as told in every mixture.

    Raises ValueError for a model without experts, or with windows or caps.
    """
    experts, (num_rows, length) = config.experts, (tokens.shape[0], tokens.shape[1] - 1)
    if experts is None or any(config.windows) or config.score_cap is not None:
        raise ValueError("config: wanted a model that mixes experts, without windows or caps")
    rule, told = (taking, None) if isinstance(taking, ExpertRule) else (None, taking)
    if told is not None:
        told = jnp.pad(jnp.moveaxis(told, 1, 0), ((start, 0), (0, 0), (0, 0)))

    def step(carry: tuple[Any, Array], at: tuple[Array, Array | None]) -> tuple[tuple[Any, Array], Taken]:
        (cache, seen), (i, counts) = carry, at

        def attend(layer: int, q: Array, k: Array, v: Array, memory: tuple, softmax: Softmax) -> tuple[Array, tuple]:
            cache, taken = memory
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new, i, 1)
                for old, new in zip(cache[layer], (k, v), strict=True)
            )
            past = jnp.arange(length)[None, None, None] <= i
            out = jax.nn.dot_product_attention(q, keys, values, mask=past, scale=softmax.scale)
            return out, ((*cache[:layer], (keys, values), *cache[layer + 1 :]), taken)

        def mix(layer: int, of_layer: Experts, x: Array, memory: tuple) -> tuple[Array, tuple]:
            cache, taken = memory

            def count(probability: Float[Array, "r c"]) -> Int[Array, " r"]:
                if rule is not None:
                    asked = jax.vmap(rule)(probability, seen)
                else:
                    assert counts is not None
                    asked = counts[:, len(taken)]
                return jnp.where(i < start, experts.num_per_token, jnp.clip(asked, 1, experts.num_per_token))

            choice = choose(experts, gate(of_layer, x[:, 0]), count)
            out = mixed(of_layer, x[:, 0], choice, "every", experts.activation)
            return out[:, None], (cache, (*taken, choice.expert))

        position = jnp.full((num_rows, 1), i)
        logits, (cache, taken) = forward(params, config, tokens[:, i][:, None], position, attend, (cache, ()), mix)
        following = jnp.take_along_axis(jax.nn.log_softmax(logits[:, 0]), tokens[:, i + 1][:, None], axis=1)[:, 0]
        found = Taken(loss=-following, entropy=seen, expert=jnp.stack(taken, axis=1))
        predicted = entropy.entropy(entropy.moments(logits[:, 0]))
        return (cache, jnp.where(i < start, jnp.inf, predicted)), found

    empty = jnp.zeros((num_rows, length, config.num_kv_heads, config.head_dim), params.embedding.dtype)
    begun = ((empty, empty),) * config.num_layers, jnp.full(num_rows, jnp.inf)
    _, found = jax.lax.scan(step, begun, (jnp.arange(length), told))
    return jax.tree.map(lambda x: jnp.moveaxis(x[start:], 0, 1), found)


def counts(config: ModelConfig, taken: Taken) -> Int[np.ndarray, "r m l"]:
    """Return how many experts every measured token went to in every mixture."""
    assert config.experts is not None
    return np.sum(np.asarray(taken.expert) < config.experts.num_experts, axis=-1, dtype=np.int32)


def even(mean: float, like: Int[np.ndarray, "r m l"], seed: int = 0) -> Int[np.ndarray, "r m l"]:
    """Return counts as constant as whole numbers of that `mean` can be: the greater ones stand at random places."""
    least = int(mean)
    found = np.full(like.size, least, np.int32)
    found[: round((mean - least) * like.size)] += 1
    return np.random.default_rng(seed).permutation(found).reshape(like.shape)


def shuffled(given: Int[np.ndarray, "r m l"], seed: int = 0) -> Int[np.ndarray, "r m l"]:
    """Return the counts of each token given to another one, of any row: the same in every mixture, all together."""
    tokens = given.reshape(-1, given.shape[-1])
    return np.random.default_rng(seed).permutation(tokens).reshape(given.shape)


def union(config: ModelConfig, taken: Taken, batch: int) -> float:
    """Return how many experts of a mixture a step of `batch` rows touches, the mean over mixtures, steps and batches.

    Rows are taken in their order, `batch` at a time; those left over are not counted.
    """
    assert config.experts is not None
    expert = np.asarray(taken.expert)
    groups = expert[: len(expert) // batch * batch].reshape(-1, batch, *expert.shape[1:])
    touched = [np.any(groups == number, axis=(1, 4)) for number in range(config.experts.num_experts)]
    return float(np.sum(touched, axis=0).mean())
