"""Policies: which entries of a sequence's KV cache a compression keeps.

They rank by past attention; nothing is guaranteed about what later queries attend to.
"""

import dataclasses
import itertools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.softmax import Softmax
from et_jax.types import check_numbers, pytree, static


@pytree
class Entries:
    """One layer of one sequence as a policy sees it: of each KV head the entries from `first` to `count`, in order.

    `keys` are rotated. `queries` are the sequence's last ones, rotated likewise; query i belongs to the token whose
    entry is at place `at[i]`. Both are None if the policy does not read them. `softmax` is that of the layer, `layer`
    its number; in a scan over equal layers `layer` is the number of the first one, and `number`
    the layer's own.
    """

    keys: Float[Array, "k n d"]
    first: Int[Array, " k"]
    count: Int[Array, ""]
    queries: Float[Array, "w h d"] | None
    at: Int[Array, " w"] | None
    softmax: Softmax
    layer: int = static()
    number: Int[Array, ""] | None = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """Scores entries, and sets how many blocks of them each layer and KV head keeps. Derive from it.

    A policy is part of the program: a frozen dataclass compared by value. `reads_queries` is true if it ranks by the
    last queries, `splits` if heads or layers keep different numbers of entries.
    """

    reads_queries: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return the score of each entry; the last `window` entries are kept regardless of it."""
        raise NotImplementedError

    def layer_blocks(self, blocks: int, least: int, num_layers: int) -> tuple[int, ...]:
        """Return the mean number of blocks per KV head of each layer: `blocks` on average, each at least `least`.

        Layers with a sliding window are excluded.
        """
        return (blocks,) * num_layers

    def region(self, layers: tuple[int, ...]) -> int:
        """Return the blocks of the region, the most that a head can keep, from those of the layers."""
        return max(layers)

    def head_blocks(
        self, score: Float[Array, "k n"], blocks: int, region: int, window: int, page_size: int
    ) -> Int[Array, " k"]:
        """Return the blocks each KV head keeps, on average at most `blocks`.

        `score` is -inf for excluded entries and for the last `window` ones, which all heads keep.
        """
        return jnp.full(score.shape[0], blocks, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Latent(Policy):
    """Keeps the entries of greatest attention mass: softmax(q k / sqrt d), mean over last queries and the head group.

    Every query attends to the entries up to its own token. The masses before the window are averaged over `pooling`
    neighbours. With a gap of g the window contains the queries of g decoded tokens and, before them, of
    the prompt's last ones (EntropyInfer, arXiv 2606.09508: 16 of each); without a gap only those of the prompt
    (SnapKV, Li et al. 2024).
    """

    reads_queries: ClassVar[bool] = True

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return the mean attention mass."""
        mass = attention_mass(entries)
        before = jnp.where(jnp.arange(mass.shape[1]) < entries.count - window, mass, 0.0)
        return pooled(before, pooling)


@dataclasses.dataclass(frozen=True)
class AdaKV(Latent):
    """Ranks as `Latent`, and splits a layer's entries over its KV heads (AdaKV, Feng et al. 2024).

    Each head keeps a floor of the share `floor` of the budget beyond the window, and of the rest in proportion to
    its number of the layer's top entries; all rounded to full blocks with the sum of equal budgets. No head
    keeps more than `most` times the budget, which is the region; the excess is not redistributed. Source of the
    floor: the paper, section 4 (0.2).
    """

    splits: ClassVar[bool] = True
    floor: float = 0.2
    most: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor: got {self.floor}, wanted a share from 0 to 1")
        if self.most < 1:
            raise ValueError(f"most: got {self.most}, wanted at least 1")

    def region(self, layers: tuple[int, ...]) -> int:
        """Return the most that one head may keep."""
        return self.most * max(layers)

    def head_blocks(
        self, score: Float[Array, "k n"], blocks: int, region: int, window: int, page_size: int
    ) -> Int[Array, " k"]:
        """Return the floor plus a share of the rest by the layer's top entries, rounded by greatest remainders."""
        num_heads, num_places = score.shape
        beyond = blocks * page_size - window
        least = math.ceil((window + self.floor * beyond) / page_size)
        top = jax.lax.top_k(score.reshape(-1), num_heads * beyond)[1]
        there = jnp.isfinite(score.reshape(-1)[top]).astype(jnp.int32)
        own = jnp.zeros(num_heads, jnp.int32).at[top // num_places].add(there)
        rest = num_heads * (blocks - least)
        exact = rest * own.astype(jnp.float32) / jnp.maximum(jnp.sum(there), 1).astype(jnp.float32)
        full = jnp.floor(exact)
        left = rest - jnp.sum(full).astype(jnp.int32)
        rank = jnp.argsort(jnp.argsort(full - exact))  # the greatest remainder first, of equal ones the first head
        return jnp.minimum(least + full.astype(jnp.int32) + (rank < left).astype(jnp.int32), region)


@dataclasses.dataclass(frozen=True)
class PyramidKV(Latent):
    """Ranks as `Latent`, with a budget that decreases from the first layer to the last (PyramidKV, Cai et al. 2024).

    Beyond the blocks of the window, layers keep from 2 m - m / beta blocks down to m / beta in equal steps, m
    the mean and beta the `steepness`; rounded to full blocks with the sum of equal budgets. Source: the
    paper, section 3.2 (beta 20).
    """

    splits: ClassVar[bool] = True
    steepness: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= self.steepness < math.inf:
            raise ValueError(f"steepness: got {self.steepness}, wanted at least 1, where all layers are equal")

    def layer_blocks(self, blocks: int, least: int, num_layers: int) -> tuple[int, ...]:
        """Return the decreasing numbers of blocks."""
        mean = blocks - least
        lowest = mean / self.steepness
        step = 2 * (mean - lowest) / max(num_layers - 1, 1)
        highest = mean + step * (num_layers - 1) / 2
        ends, end = [0], 0.0
        for layer in range(num_layers):
            end += highest - step * layer
            ends.append(round(end))
        return tuple(least + after - before for before, after in itertools.pairwise(ends))


@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first `sinks` entries and the most recent ones (StreamingLLM, Xiao et al. 2023: 4 sinks)."""

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks}, wanted at least 0")

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return the place as the score, and a greater score for the sinks."""
        k, n, _ = entries.keys.shape
        place = jnp.arange(n)
        return jnp.broadcast_to(jnp.where(place < self.sinks, n, place).astype(jnp.float32), (k, n))


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Keeps random entries, drawn from `seed`, the layer and their number: the baseline for any other policy."""

    seed: int = 0

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return uniform scores from 0 to 1."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        layer = entries.layer if entries.number is None else entries.number
        key = jax.random.fold_in(jax.random.fold_in(key, layer), entries.count)
        return jax.random.uniform(key, entries.keys.shape[:2])


def attention_mass(entries: Entries) -> Float[Array, "k n"]:
    """Return the attention mass on every entry, mean over the queries and over the query heads of the KV head.

    Float32; 0 where there is no entry. A query at place p attends to the places up to p. The mass of a layer's sink is
    excluded.
    """
    queries, at = entries.queries, entries.at
    if queries is None or at is None:
        raise ValueError("queries: got None, wanted the last queries of the sequence, by which this policy ranks")
    k, n, d = entries.keys.shape
    grouped = queries.astype(jnp.float32).reshape(len(at), k, -1, d).transpose(1, 2, 0, 3)
    seen = jnp.arange(n) <= jnp.minimum(at, entries.count - 1)[:, None]  # "w n"

    def of_head(given: tuple[Float[Array, "g w d"], Float[Array, "n d"], Int[Array, ""]]) -> Float[Array, " n"]:
        query, key, first = given
        scores = jnp.einsum("gwd,nd->gwn", query, key.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        scores = entries.softmax.capped(scores * entries.softmax.scale)
        mass = jax.nn.softmax(jnp.where(seen & (jnp.arange(n) >= first), scores, -jnp.inf), axis=-1)
        return jnp.mean(mass, axis=(0, 1))

    return jax.lax.map(of_head, (grouped, entries.keys, entries.first))  # one head at a time: its scores are "g w n"


def pooled(score: Float[Array, "k n"], pooling: int) -> Float[Array, "k n"]:
    """Return the mean over `pooling` neighbours centred on each entry; entries beyond the ends count as 0."""
    side, n = pooling // 2, score.shape[1]
    padded = jnp.pad(score, ((0, 0), (side, side)))
    return sum((padded[:, i : i + n] for i in range(1, pooling)), padded[:, :n]) / pooling


POLICIES: dict[str, Policy] = {
    "latent": Latent(),
    "snapkv": Latent(),
    "adakv": AdaKV(),
    "pyramidkv": PyramidKV(),
    "streaming": Streaming(),
    "random": Random(),
}
