"""Policies: which entries of a sequence's KV cache are worth keeping when it is compressed.

What is kept is chosen from what was observed, and nothing is proved of what later queries will ask for.
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
    """What a policy sees of one layer of one sequence: of each KV head the entries from `first` to `count`, in order.

    `keys` are rotated. `queries` are the sequence's last, rotated likewise; query i is that of the token whose entry
    stands at place `at[i]`. Both are None where the policy reads none. `softmax` is that of the layer, `layer`
    its number; or, where layers that are alike are compressed by one program, that of the first of them, and `number`
    its own.
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
    """Scores entries, and says how many blocks of them each layer and KV head keeps. Derive from it.

    A policy is part of the program: a frozen dataclass, told by its value. `reads_queries` says whether it ranks by the
    last queries, `splits` whether heads or layers keep different numbers of entries.
    """

    reads_queries: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return how much each entry is worth keeping; the last `window` are kept whatever is said of them."""
        raise NotImplementedError

    def layer_blocks(self, blocks: int, least: int, num_layers: int) -> tuple[int, ...]:
        """Return the blocks that each KV head of a layer keeps in the mean: `blocks` over all layers, at least `least`.

        Layers with a sliding window are not among them.
        """
        return (blocks,) * num_layers

    def region(self, layers: tuple[int, ...]) -> int:
        """Return the blocks of the region, given those of the layers: the most that a head can keep."""
        return max(layers)

    def head_blocks(
        self, score: Float[Array, "k n"], blocks: int, region: int, window: int, page_size: int
    ) -> Int[Array, " k"]:
        """Return the blocks each KV head keeps, `blocks` in the mean at most; `score` is -inf for what it may not be.

        So it is for the last `window` entries, which all heads keep.
        """
        return jnp.full(score.shape[0], blocks, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Latent(Policy):
    """Keeps what the last queries attend to the most: softmax(q k / sqrt d), mean over queries and the KV head's group.

    Every query sees the entries up to its own token's. The masses are averaged over as many neighbours as `pooling`
    says, among the entries before the window. With a gap of g the window holds the queries of g decoded tokens, and of
    the prompt's last ones before them (EntropyInfer, arXiv 2606.09508: 16 of each); with none those of the prompt alone
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

    Each head keeps a floor of the share `floor` of the budget beyond the window, and of the rest in proportion to how
    many of the layer's top entries are its own; all rounded to whole blocks, the sum as if they were equal. No head
    keeps more than `most` times the budget, which is the region; what is above it is not handed on. Source of the
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
        """Return the floor, and the rest by the shares of the layer's top entries, by greatest remainders."""
        num_heads, num_places = score.shape
        beyond = blocks * page_size - window
        least = math.ceil((window + self.floor * beyond) / page_size)
        top = jax.lax.top_k(score.reshape(-1), num_heads * beyond)[1]
        there = jnp.isfinite(score.reshape(-1)[top]).astype(jnp.int32)
        own = jnp.zeros(num_heads, jnp.int32).at[top // num_places].add(there)
        rest = num_heads * (blocks - least)
        exact = rest * own.astype(jnp.float32) / jnp.maximum(jnp.sum(there), 1).astype(jnp.float32)
        whole = jnp.floor(exact)
        left = rest - jnp.sum(whole).astype(jnp.int32)
        rank = jnp.argsort(jnp.argsort(whole - exact))  # the greatest remainder first, of equal ones the first head
        return jnp.minimum(least + whole.astype(jnp.int32) + (rank < left).astype(jnp.int32), region)


@dataclasses.dataclass(frozen=True)
class PyramidKV(Latent):
    """Ranks as `Latent`, and lets the budget fall from the first layer to the last (PyramidKV, Cai et al. 2024).

    Beyond the blocks that hold the window, layers keep from 2 m - m / beta blocks down to m / beta in equal steps, m
    the mean and beta the `steepness`; rounded to whole blocks so that the sum is as if they were equal. Source: the
    paper, section 3.2 (beta 20).
    """

    splits: ClassVar[bool] = True
    steepness: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= self.steepness < math.inf:
            raise ValueError(f"steepness: got {self.steepness}, wanted at least 1, where all layers are equal")

    def layer_blocks(self, blocks: int, least: int, num_layers: int) -> tuple[int, ...]:
        """Return the falling numbers of blocks."""
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
        """Return the place, and more than any for the sinks."""
        k, n, _ = entries.keys.shape
        place = jnp.arange(n)
        return jnp.broadcast_to(jnp.where(place < self.sinks, n, place).astype(jnp.float32), (k, n))


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Keeps entries at random, drawn by `seed`, the layer and how many there are: what any other policy must beat."""

    seed: int = 0

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return numbers from 0 to 1."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        layer = entries.layer if entries.number is None else entries.number
        key = jax.random.fold_in(jax.random.fold_in(key, layer), entries.count)
        return jax.random.uniform(key, entries.keys.shape[:2])


def attention_mass(entries: Entries) -> Float[Array, "k n"]:
    """Return the attention mass on every entry, mean over the queries and over the query heads of the KV head.

    Float32; 0 where there is no entry. A query at place p sees the places up to p. It is mass among the entries: what a
    sink of the layer takes is not counted.
    """
    queries, at = entries.queries, entries.at
    if queries is None or at is None:
        raise ValueError("queries: got None, wanted the last ones of the sequence, by which this policy ranks")
    k, n, d = entries.keys.shape
    grouped = queries.astype(jnp.float32).reshape(len(at), k, -1, d).transpose(1, 2, 0, 3)
    seen = jnp.arange(n) <= jnp.minimum(at, entries.count - 1)[:, None]  # "w n"

    def of_head(given: tuple[Float[Array, "g w d"], Float[Array, "n d"], Int[Array, ""]]) -> Float[Array, " n"]:
        query, key, first = given
        scores = jnp.einsum("gwd,nd->gwn", query, key.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        scores = entries.softmax.capped(scores * entries.softmax.scale)
        mass = jax.nn.softmax(jnp.where(seen & (jnp.arange(n) >= first), scores, -jnp.inf), axis=-1)
        return jnp.mean(mass, axis=(0, 1))

    return jax.lax.map(of_head, (grouped, entries.keys, entries.first))  # head by head: the scores of one are "g w n"


def pooled(score: Float[Array, "k n"], pooling: int) -> Float[Array, "k n"]:
    """Return the mean of `pooling` neighbours, an entry in the middle; what is beyond the ends counts as 0."""
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
