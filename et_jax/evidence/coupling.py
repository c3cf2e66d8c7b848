"""How often two models that sample the same token with the same noise agree, and how often they could at best.

From both models' distributions p and q:

    optimum      sum_i min(p_i, q_i), that of rejection sampling (Leviathan et al. 2023)
    race         sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): both sample with the same noise E, and token i wins both
                 races where E_j / E_i >= max(p_j / p_i, q_j / q_i) for every j
    sampled      the same as `sample_token` does it, with several keys, and its distance from `race` in standard errors
    bound        (1 - TV) / (1 + TV), which the race reaches at least (Daliri, Musco and Suresh 2024)
    inverse CDF  one uniform number through both distribution functions, the tokens in the vocabulary's order
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from et_jax.decode.sampling import fold_key, plain, sample_token
from et_jax.types import replace
from scripts.measuring import paired


def probabilities(logits: Float[Array, "n v"], temperature: float) -> Float[np.ndarray, "n v"]:
    """Return softmax(logits / temperature) in float64."""
    heated = np.asarray(logits, np.float64) / temperature
    weight = np.exp(heated - heated.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def optimum(p: Float[np.ndarray, "n v"], q: Float[np.ndarray, "n v"]) -> Float[np.ndarray, " n"]:
    """Return the probability of agreement under the best coupling, 1 - TV."""
    return np.minimum(p, q).sum(axis=-1)


def bound(p: Float[np.ndarray, "n v"], q: Float[np.ndarray, "n v"]) -> Float[np.ndarray, " n"]:
    """Return the least probability with which races of the same noise agree, (1 - TV) / (1 + TV)."""
    best = optimum(p, q)
    return best / (2.0 - best)


def race(p: Float[np.ndarray, "n v"], q: Float[np.ndarray, "n v"]) -> Float[np.ndarray, " n"]:
    """Return the probability that races of the same noise have the same winner; p and q above 0.

    In the order of p / q, the greatest first, max(p_j / p_i, q_j / q_i) is p_j / p_i up to i, and q_j / q_i after it.
    """
    order = np.argsort(q / p, axis=-1)
    p, q = np.take_along_axis(p, order, axis=-1), np.take_along_axis(q, order, axis=-1)
    behind = np.cumsum(q[:, :0:-1], axis=-1)[:, ::-1]
    behind = np.concatenate([behind, np.zeros_like(q[:, :1])], axis=-1)
    return (1.0 / (np.cumsum(p, axis=-1) / p + behind / q)).sum(axis=-1)


def inverse_cdf(p: Float[np.ndarray, "n v"], q: Float[np.ndarray, "n v"]) -> Float[np.ndarray, " n"]:
    """Return the probability that one uniform number gives both the same token: the overlap of their intervals."""
    ends = [np.pad(np.cumsum(x, axis=-1), ((0, 0), (1, 0))) for x in (p, q)]
    shared = np.minimum(*(x[:, 1:] for x in ends)) - np.maximum(*(x[:, :-1] for x in ends))
    return np.maximum(shared, 0.0).sum(axis=-1)


@jax.jit
def sampled(
    logits: Float[Array, "n v"],
    temperature: Float[Array, ""],
    key: UInt32[Array, "n 2"],
    position: Int[Array, " n"],
) -> Int[Array, " n"]:
    """Return the winners of the engine's race, nothing truncated."""
    each = jnp.full(logits.shape[0], temperature, jnp.float32)
    return sample_token(logits, each, jnp.full_like(each, -jnp.inf), key, position)


def keys(seeds: Int[np.ndarray, " n"]) -> UInt32[Array, "n 2"]:
    """Return the keys that the requests of these seeds sample with."""
    own = jnp.stack([jnp.zeros(len(seeds), jnp.uint32), jnp.asarray(seeds, jnp.uint32)], axis=1)
    settings = replace(plain(own.shape[:1]), key=own)
    return jax.vmap(fold_key, in_axes=(0, None))(settings, jnp.int32(0)).key


EXACT = {"optimum": optimum, "race": race, "bound": bound, "inverse CDF": inverse_cdf}


def acceptance(
    logits: Float[Array, "r n v"],
    drafter: Float[Array, "r n v"],
    temperature: float,
    first: int,
    num_keys: int,
    seed: int,
) -> dict[str, Any]:
    """Return shares accepted with intervals over rows.

    Tokens are sampled as those of positions from `first` on, with keys of seeds from `seed` on. `sigmas` is how many
    standard errors the sampled share is off the race's exact one. At temperature 0 every way accepts the same.
    """
    num_rows, n, _ = logits.shape
    if temperature == 0:
        same = np.asarray(logits.argmax(-1) == drafter.argmax(-1), np.float64).mean(1)
        return {"shares": {name: _share(same) for name in EXACT}}
    shares: dict[str, list] = {name: [] for name in (*EXACT, "sampled")}
    variance = 0.0
    position, heat = jnp.arange(first, first + n, dtype=jnp.int32), jnp.float32(temperature)
    for row in range(num_rows):
        p, q = (probabilities(model[row], temperature) for model in (logits, drafter))
        found = {name: agreement(p, q) for name, agreement in EXACT.items()}
        hits = np.zeros(n)
        for number in range(row * num_keys, (row + 1) * num_keys):
            key = keys(np.full(n, seed + number))
            tokens = (np.asarray(sampled(model[row], heat, key, position)) for model in (logits, drafter))
            hits += np.equal(*tokens)
        for name, each in found.items():
            shares[name].append(each.mean())
        shares["sampled"].append(hits.mean() / num_keys)
        variance += float((found["race"] * (1.0 - found["race"])).sum()) / num_keys
    error = variance**0.5 / (num_rows * n)
    off = float(np.mean(shares["sampled"]) - np.mean(shares["race"]))
    return {"shares": {name: _share(np.array(each)) for name, each in shares.items()}, "sigmas": off / error}


def _share(rows: Float[np.ndarray, " r"]) -> list[float]:
    """The mean over rows, and the ends of its interval."""
    return [float(rows.mean()), *paired.interval(rows)]
