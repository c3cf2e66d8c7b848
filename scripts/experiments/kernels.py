"""How long decode attention takes by the share of the blocks it reads, beside a plain copy of memory.

Every backend of the device reads all blocks, then fewer. Beside them stands attention to the same tokens laid out in
order: two products in XLA, and cuDNN's on a GPU. A round is a chain of calls, each over tokens
of its own, so that no cache of the processor has them. A copy counts the bytes that it reads and writes, attention the
keys and values that it must read. Heads are those of Llama-3-8B. `--batches`, `--contexts` and `--pages` replace the
sizes for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from scripts.measuring.experiment import Base, Experiment, Figure, Group, Missed, setting
from scripts.measuring.timing import Round, seconds

HEADS, KV_HEADS, DIM = 32, 8, 128
SIZES = {  # batches, contexts, pages: in products, less those beyond `MOST` tokens
    "cpu": ((1, 2), (16_384,), (16, 64)),
    "gpu": ((1, 8, 64), (1024, 8192, 32_768, 131_072), (64,)),
    "tpu": ((1, 8, 64), (1024, 8192, 32_768, 131_072), (128,)),
}
MOST = 64 * 32_768


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    batches: tuple[int, ...] = setting((), "queries; none for the device's own", least=1, quick=(1,))
    contexts: tuple[int, ...] = setting((), "tokens that each attends to; none for the device's own", quick=(256,))
    pages: tuple[int, ...] = setting((), "tokens of a page; none for the device's own", least=1, quick=(64,))
    shares: tuple[float, ...] = setting((1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16), "of the blocks", most=1.0, quick=(1.0, 0.5))
    megabytes: int = setting(0, "that a chain of calls covers, and the copy; 0 for the device's own", quick=1)
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

    def __init__(self, batch: int, context: int, page_size: int, spread: int, least_share: float) -> None:
        self.batch, self.context, self.page_size = batch, context, page_size
        self.dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        self.num_blocks, self.spread = context // page_size, spread
        self.num_bytes = batch * KV_HEADS * context * 2 * DIM * jnp.dtype(self.dtype).itemsize
        self.chains = max(2, int(spread / (self.num_bytes * least_share)))
        pool = (KV_HEADS, 1 + self.chains * batch * self.num_blocks, page_size, 2 * DIM)
        self.pages = jax.jit(lambda: jax.random.normal(jax.random.key(0), pool, self.dtype))()

    def paged(self, backend: str, share: float) -> Round:
        """Return a backend at a share of the blocks, the last among them, listed in ascending order."""
        rng, b, n = np.random.default_rng(0), self.batch, self.num_blocks
        count = max(1, round(n * share))

        def listed() -> np.ndarray:
            chosen = np.sort(rng.choice(n - 1, count - 1, replace=False))
            return np.pad(np.append(chosen, n - 1), (0, n - count))

        tables = jnp.asarray(rng.permutation(self.chains * b * n).reshape(self.chains, b, n) + 1, jnp.int32)
        blocks = jnp.asarray(np.stack([listed() for _ in range(b * KV_HEADS)]).reshape(b, KV_HEADS, n), jnp.int32)
        counts, lengths = jnp.full((b, KV_HEADS), count, jnp.int32), jnp.full(b, self.context, jnp.int32)
        softmax = Softmax(scale=DIM**-0.5)

        def chain(query: Array, pages: Array, tables: Array) -> Array:
            def call(i: Array, query: Array) -> Array:
                given = query, pages, tables[i], blocks, counts, lengths
                return paged_attention(*given, softmax=softmax, backend=backend)[0]

            return lax.fori_loop(0, self.chains, call, query)

        arguments = jnp.ones((b, HEADS, DIM), self.dtype), self.pages, tables
        try:
            program = jax.jit(chain).lower(*arguments).compile()
        except NotImplementedError as reason:
            raise Missed(str(reason)) from reason
        return timed(self.num_bytes * count // n, self.chains, partial(program, *arguments))

    def in_order(self, attend: Callable[..., Array], query: tuple[int, ...], cache: tuple[int, ...]) -> Round:
        """Return attention to all tokens laid out in order, in the layout that it reads best."""
        calls = max(2, min(64, self.spread // self.num_bytes))
        normal = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), cache, self.dtype))
        caches = [(normal(2 * i), normal(2 * i + 1)) for i in range(calls)]

        def chain(query: Array, caches: list[tuple[Array, Array]]) -> Array:
            for key, value in caches:
                query = attend(query, key, value)
            return query

        arguments = jnp.ones(query, self.dtype), caches
        try:
            program = jax.jit(chain).lower(*arguments).compile()
        except (RuntimeError, NotImplementedError, ValueError) as reason:
            raise Missed(str(reason).splitlines()[0]) from reason
        return timed(self.num_bytes, calls, partial(program, *arguments))

    def arms(self, shares: tuple[float, ...], copy: int) -> dict[str, Callable[[], Round]]:
        """Return all that is timed, by name."""
        b, t, k, g, d = self.batch, self.context, KV_HEADS, HEADS // KV_HEADS, DIM
        found: dict[str, Callable[[], Round]] = {"copy": partial(copied, copy)}
        found |= {f"{name}, {share:.4g}": partial(self.paged, name, share) for name in backends() for share in shares}
        found["in order, einsum"] = partial(self.in_order, einsum_attention, (b, k, g, d), (b, k, t, d))
        if jax.default_backend() == "gpu":
            cudnn = partial(jax.nn.dot_product_attention, implementation="cudnn")
            found["in order, cudnn"] = partial(self.in_order, cudnn, (b, 1, HEADS, d), (b, t, k, d))
        return found


def einsum_attention(query: Array, key: Array, value: Array) -> Array:
    """Return attention of queries "b k g d" over "b k t d", as XLA makes it of two products and a softmax."""
    scores = jnp.einsum("bkgd,bktd->bkgt", query, key, preferred_element_type=jnp.float32) * DIM**-0.5
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bkgt,bktd->bkgd", weights, value, preferred_element_type=jnp.float32).astype(value.dtype)


def backends() -> list[str]:
    """Return the backends of this device, but for the definition."""
    found = []
    for backend in BACKENDS:
        try:
            found.append(resolve(backend, BACKENDS))
        except NotImplementedError:
            continue
    return [backend for backend in found if backend != "reference"]


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each size."""
    kind = jax.default_backend()
    own = SIZES[kind]
    batches, contexts, pages = (
        given or usual for given, usual in zip((settings.batches, settings.contexts, settings.pages), own, strict=True)
    )
    spread = settings.megabytes * 2**20 or (2**26 if kind == "cpu" else 2**27)
    copy = settings.megabytes * 2**20 or (2**27 if kind == "cpu" else 2**31)
    for batch in batches:
        for context in contexts:
            for page_size in pages:
                if batch * context <= MOST:
                    case = Case(batch, context, page_size, spread, min(settings.shares))
                    labels = {"batch": batch, "tokens": context, "page": page_size}
                    arms = case.arms(settings.shares, copy)
                    yield Group(labels=labels, arms=arms, baseline="copy", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="How long does decode attention take by the share of the blocks it reads, beside a copy of memory?",
    settings=Settings,
    groups=groups,
    figures={
        "milliseconds": Figure(header="ms a call"),
        "gb_per_s": Figure(header="GB/s", against="ratio"),
    },
    timed=True,
)
