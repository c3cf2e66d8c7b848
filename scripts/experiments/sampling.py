"""What sampling a token costs: by a race, greedily.

Loops over random logits, of which every pass needs the token before it: `greedy` takes the first of the greatest
logits, `race` is `sample_token`, the greatest weight / E. Beside them is the noise E alone, by `random_bits` and by
JAX's Threefry.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from et_jax.decode.noise import exponential, random_bits
from et_jax.decode.sampling import sample_token
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.timing import Round, seconds

ELEMENTS = 2_000_000  # logits of a loop, at least


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    vocabularies: tuple[int, ...] = setting((4096, 49_152, 151_936), "tokens that there are", least=2, quick=(512,))
    rows: tuple[int, ...] = setting((1, 2, 16, 64), "rows of logits", least=1, quick=(2,))
    rounds: int = setting(9, "rounds in which all take turns", least=2, quick=2)


def greedy(logits: Float[Array, "b v"], *_: Array) -> Int[Array, " b"]:
    """Return the first of the greatest of every row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def threefry(key: UInt32[Array, "b 2"], position: Int[Array, " b"], size: int) -> UInt32[Array, "b v"]:
    """Return JAX's bits of every row's key, with the position folded in."""

    def row(key: Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(key), position), (size,))

    return jax.vmap(row)(key, position)


def noise(bits: Callable[..., Array], logits: Array, _: Array, __: Array, key: Array, position: Array) -> Array:
    """Return of every row the entry with the least noise."""
    return jnp.argmin(exponential(bits(key, position, logits.shape[-1])), axis=-1).astype(jnp.int32)


TOKENS = {
    "greedy": greedy,
    "race": sample_token,
    "noise, random_bits": partial(noise, random_bits),
    "noise, threefry": partial(noise, threefry),
}


def started(token: Callable[..., Array], vocabulary: int, rows: int) -> Round:
    """Return the loop of tokens; each nudges the logits and the position of the next, so that none can be left out."""
    rng, passes = np.random.default_rng(0), max(2, min(100, ELEMENTS // (vocabulary * rows)))
    logits = jnp.asarray(rng.normal(0, 3, (rows, vocabulary)), jnp.float32)
    heat, cut = jnp.full(rows, 0.8, jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32)
    key = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))

    @jax.jit
    def run(logits: Array) -> Array:
        def body(i: Array, last: Array) -> Array:
            nudged = jax.lax.optimization_barrier(logits + 1e-8 * last.astype(jnp.float32)[:, None])
            return token(nudged, heat, cut, key, i + last)

        return jax.lax.fori_loop(0, passes, body, jnp.zeros(rows, jnp.int32))

    return lambda: {"milliseconds": 1e3 * seconds(lambda: run(logits)) / passes}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each vocabulary and number of rows."""
    for vocabulary in settings.vocabularies:
        for rows in settings.rows:
            arms = {name: partial(started, token, vocabulary, rows) for name, token in TOKENS.items()}
            labels = {"vocabulary": vocabulary, "rows": rows}
            yield Group(labels=labels, arms=arms, baseline="greedy", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="What does sampling a token cost: by a race, greedily?",
    settings=Settings,
    groups=groups,
    figures={"milliseconds": Figure(header="ms a token of all rows", against="ratio")},
    timed=True,
)
