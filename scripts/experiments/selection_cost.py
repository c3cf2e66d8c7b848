"""What choosing blocks costs, and what it saves: one layer's decode attention, dense and pruned.

Random bfloat16 keys in the shape of a Llama-3-8B layer, a few rows of one length. `dense` is paged attention that
reads every block. A selector chooses, lists and reads (`quest`, at 1/8 of the blocks; `certified int8`, what provably
has all but half of the mass, from 8-bit codes), or chooses and lists alone (`choose ...`: `by entropy` has each
head's tolerance by the entropy of its attention, as `certified` does; `by error` chooses by expected error, as
`adaptive` does). Every call depends on the one before it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.select import Certified, PerHead, Quest, coded_bounds
from et_jax.control.selector import Selector
from et_jax.decode import cache as kv
from et_jax.decode.reading import list_blocks
from et_jax.decode.selection import Blocks, blocks_of, select, view_of
from et_jax.pallas.backend import pick
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.softmax import Softmax
from et_jax.types import replace
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.timing import Round, seconds

HEADS, KV_HEADS, DIM = 32, 8, 128
SHARE, TOLERANCE = 1 / 8, 0.5
CALLS = 4  # in a round
Choice = tuple[Array, Array]  # blocks, and how many of them


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    rows: int = setting(2, "rows", least=1)
    contexts: tuple[int, ...] = setting((4096, 16_384), "tokens of a row", least=1, quick=(256,))
    pages: tuple[int, ...] = setting((64, 16), "tokens of a page", least=1, quick=(64,))
    rounds: int = setting(9, "rounds in which all take turns", least=2, quick=2)


class Layer:
    """One layer's cache of random tokens."""

    def __init__(self, rows: int, context: int, page_size: int) -> None:
        self.rows, self.num_blocks = rows, context // page_size
        cache = kv.empty(1, KV_HEADS, DIM, rows * self.num_blocks + 1, page_size, jnp.bfloat16, key_codes=True)
        table = jnp.arange(1, rows * self.num_blocks + 1, dtype=jnp.int32).reshape(rows, -1)
        rng = np.random.default_rng(0)
        keys, values = (
            jnp.asarray(rng.standard_normal((rows, context, KV_HEADS, DIM), np.float32), jnp.bfloat16) for _ in range(2)
        )
        start, count = jnp.zeros(rows, jnp.int32), jnp.full(rows, context, jnp.int32)
        self.cache = jax.jit(kv.write, donate_argnums=0)(cache.layers[0], keys, values, table, start, count)
        self.blocks = blocks_of(table, count, page_size, None)

    def dense(self, query: Array, blocks: Blocks) -> Choice:
        """Return every block."""
        ids = jnp.arange(self.num_blocks, dtype=jnp.int32)
        shape = query.shape[0], KV_HEADS
        return jnp.broadcast_to(ids, (*shape, self.num_blocks)), jnp.full(shape, self.num_blocks, jnp.int32)

    def chosen(self, selector: Selector, query: Array, cache: kv.LayerCache, blocks: Blocks) -> Choice:
        """Return the blocks that a selector opens."""
        rows = query.shape[0]
        grouped = query.astype(jnp.float32).reshape(rows, KV_HEADS, -1, DIM) * DIM**-0.5
        each = jax.tree.map(lambda number: jnp.full(rows, number), selector)  # numbers have a row each
        view = view_of(grouped, cache, None, blocks, jnp.full(rows, TOLERANCE, jnp.float32), pick())
        return list_blocks(select(each, replace(view, sensitivity=jnp.ones(grouped.shape[:3])), blocks).opened)

    def arm(self, selector: Selector | None, reads: bool) -> Round:
        """Return what chooses, by `selector` or every block, and reads if it does."""

        def call(query: Array, cache: kv.LayerCache, blocks: Blocks) -> Choice:
            given = self.dense(query, blocks) if selector is None else self.chosen(selector, query, cache, blocks)
            if reads:
                table, softmax = blocks.table, Softmax(scale=DIM**-0.5)
                return paged_attention(query, cache.pages, table, *given, blocks.length, softmax=softmax)[0], given[1]
            return query + (given[0][..., :1].sum(axis=1)[:, None] > self.num_blocks).astype(query.dtype), given[1]

        @jax.jit
        def run(query: Array, cache: kv.LayerCache, blocks: Blocks) -> Choice:
            counts = jnp.zeros(())
            for _ in range(CALLS):
                out, counts = call(query, cache, blocks)
                query = query + jnp.asarray(1e-3, query.dtype) * out
            return query, jnp.mean(counts)

        rng = np.random.default_rng(1)
        query = jnp.asarray(rng.standard_normal((self.rows, HEADS, DIM)), jnp.bfloat16)
        given = query, self.cache, self.blocks
        share = float(run(*given)[1]) / self.num_blocks
        return lambda: {"milliseconds": 1e3 * seconds(lambda: run(*given)) / CALLS, "share_listed": share}

    def arms(self) -> dict[str, Callable[[], Round]]:
        """Return all that is timed, by name."""
        quest, proved = Quest(round(SHARE * self.num_blocks)), Certified(coded_bounds)
        by_entropy, by_error = PerHead(proved, AttentionEntropy()), ExpectedError()
        choosing = {"quest": quest, "int8": proved, "by entropy": by_entropy, "by error": by_error}
        reading = {"dense": None, "quest": quest, "certified int8": proved}
        found = {name: partial(self.arm, selector, True) for name, selector in reading.items()}
        return found | {f"choose {name}": partial(self.arm, selector, False) for name, selector in choosing.items()}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context and page size."""
    for context in settings.contexts:
        for page_size in settings.pages:
            arms = Layer(settings.rows, context, page_size).arms()
            yield Group(
                labels={"tokens": context, "page": page_size}, arms=arms, baseline="dense", rounds=settings.rounds
            )


EXPERIMENT = Experiment(
    question="What does choosing blocks cost, and what does it save, of one layer's decode attention?",
    settings=Settings,
    groups=groups,
    figures={
        "milliseconds": Figure(header="ms a call", against="ratio"),
        "share_listed": Figure(header="blocks listed"),
    },
    timed=True,
)
