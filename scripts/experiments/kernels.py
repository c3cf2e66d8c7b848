"""How long does decode attention take by the share of the blocks it reads, beside a copy of memory?

Every backend of the device reads all blocks, then fewer. Beside them stands attention of XLA to the same tokens in
order. A round is a chain of calls, each over tokens of its own, so that no cache of the processor has them. A copy
counts the bytes that it reads and writes, attention the keys and values that it must read. Heads are those of
Llama-3-8B.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from et_jax.pallas.backend import resolve
from et_jax.pallas.paged_attention.api import BACKENDS, paged_attention
from et_jax.softmax import Softmax
from scripts.measuring.experiment import Base, Figure, Group, Missed, setting
from scripts.measuring.timing import Round, seconds

HEADS, KV_HEADS, DIM = 32, 8, 128
MOST = 64 * 32_768  # tokens of a case


class Settings(Base):
    """Flags of the experiment."""

    batches: tuple[int, ...] = setting((1, 8, 64), "queries", least=1, quick=(1,))
    contexts: tuple[int, ...] = setting((1024, 8192, 32_768, 131_072), "tokens that each attends to", quick=(256,))
    pages: tuple[int, ...] = setting((64,), "tokens of a page", least=1)
    shares: tuple[float, ...] = setting((1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16), "of the blocks", most=1.0, quick=(1.0, 0.5))
    megabytes: int = setting(128, "that a chain of calls covers, at least", least=1, quick=1)
    copied: int = setting(2048, "megabytes of the copy", least=1, quick=1)
    rounds: int = setting(15, "rounds in which all take turns", least=2, quick=2)


def timed(num_bytes: int, num_calls: int, run: Callable[[], Any]) -> Round:
    """Return a round of a chain of calls: milliseconds of one, and the bytes a second that it moves."""

    def round_() -> dict[str, float]:
        took = seconds(run) / num_calls
        return {"milliseconds": 1e3 * took, "gb_per_s": num_bytes / took / 1e9}

    return round_


def copied(num_bytes: int) -> Round:
    """Return a plain pass over memory: every byte read, changed and written, in place, so that none is allocated."""
    program = jax.jit(jnp.negative, donate_argnums=0)
    data = [jnp.ones(num_bytes // 4, jnp.float32)]

    def run() -> Array:
        data[0] = program(data[0])
        return data[0]

    return timed(2 * num_bytes, 1, run)


class Case:
    """A decode step's attention: `batch` queries, each over `context` tokens in pages."""

    def __init__(self, batch: int, context: int, page_size: int, settings: Settings) -> None:
        self.batch, self.context = batch, context
        self.dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        self.num_blocks = context // page_size
        self.num_bytes = batch * KV_HEADS * context * 2 * DIM * jnp.dtype(self.dtype).itemsize
        self.calls = max(2, int(settings.megabytes * 2**20 / (self.num_bytes * min(settings.shares))))
        pool = (KV_HEADS, 1 + self.calls * batch * self.num_blocks, page_size, 2 * DIM)
        self.pages = jax.jit(lambda: jax.random.normal(jax.random.key(0), pool, self.dtype))()

    def paged(self, backend: str, share: float) -> Round:
        """Return a backend at a share of the blocks, the last among them, listed in ascending order."""
        rng, b, n = np.random.default_rng(0), self.batch, self.num_blocks
        count = max(1, round(n * share))

        def listed() -> np.ndarray:
            chosen = np.sort(rng.choice(n - 1, count - 1, replace=False))
            return np.pad(np.append(chosen, n - 1), (0, n - count))

        tables = jnp.asarray(rng.permutation(self.calls * b * n).reshape(self.calls, b, n) + 1, jnp.int32)
        blocks = jnp.asarray(np.stack([listed() for _ in range(b * KV_HEADS)]).reshape(b, KV_HEADS, n), jnp.int32)
        counts, lengths = jnp.full((b, KV_HEADS), count, jnp.int32), jnp.full(b, self.context, jnp.int32)

        def call(query: Array, pages: Array, table: Array) -> Array:
            given = query, pages, table, blocks, counts, lengths
            return paged_attention(*given, softmax=Softmax(scale=DIM**-0.5), backend=backend)[0]

        def chain(query: Array, pages: Array, tables: Array) -> Array:
            return lax.fori_loop(0, self.calls, lambda i, query: call(query, pages, tables[i]), query)

        arguments = jnp.ones((b, HEADS, DIM), self.dtype), self.pages, tables
        try:
            program = jax.jit(chain).lower(*arguments).compile()
        except NotImplementedError as reason:
            raise Missed(str(reason)) from reason
        return timed(self.num_bytes * count // n, self.calls, partial(program, *arguments))

    def in_order(self) -> Round:
        """Return attention of XLA to all tokens laid out in order."""
        calls = min(64, self.calls)
        shape = calls, self.batch, self.context, KV_HEADS, DIM
        keys, values = (jax.random.normal(jax.random.key(seed), shape, self.dtype) for seed in range(2))

        @jax.jit
        def chain(query: Array, keys: Array, values: Array) -> Array:
            return lax.fori_loop(0, calls, lambda i, q: jax.nn.dot_product_attention(q, keys[i], values[i]), query)

        query = jnp.ones((self.batch, 1, HEADS, DIM), self.dtype)
        return timed(self.num_bytes, calls, partial(chain, query, keys, values))


def backends() -> Iterator[str]:
    """Yield the backends of this device, but for the definition."""
    for backend in BACKENDS:
        try:
            found = resolve(backend, BACKENDS)
        except NotImplementedError:
            continue
        if found != "reference":
            yield found


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each size of at most `MOST` tokens."""
    for batch, context, page_size in itertools.product(settings.batches, settings.contexts, settings.pages):
        if batch * context > MOST:
            continue
        case = Case(batch, context, page_size, settings)
        arms = {"copy": partial(copied, settings.copied * 2**20), "in order": case.in_order}
        for name, share in itertools.product(backends(), settings.shares):
            arms[f"{name}, {share:.4g}"] = partial(case.paged, name, share)
        labels = {"batch": batch, "tokens": context, "page": page_size}
        yield Group(labels=labels, arms=arms, baseline="copy", rounds=settings.rounds)


FIGURES = {
    "milliseconds": Figure(header="ms a call"),
    "gb_per_s": Figure(header="GB/s", against="ratio"),
}
