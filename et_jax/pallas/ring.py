"""A ring of buffers for pages that are prefetched, shared by the paged kernels on a TPU.

Each grid step processes a list of pages, one group at a time. While one group is processed, the next ones
are being copied, each into a buffer of the ring. The copies run ahead over the end of a list: during the
last groups of one grid step the first groups of the next are fetched, which hides the
memory latency of short lists. Grid steps must run in order, on one core.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from et_jax.pallas.checks import EIGHT_BITS, LANES, SUBLANES, require

# Each page of a group is several lines of the compiled step.
MOST_PAGES = 32
# The bytes in flight that saturate memory: bandwidth times latency, 1.6 TB/s (v6e) times about 1.5 us.
BYTES_IN_FLIGHT = 5 * 2**19
# Kernels get 16 MiB of a core's vector memory by default; the ring takes at most half of that.
RING_BYTES = 2**23
VECTOR_MEMORY_BYTES = 2**24
# A v5e or v6e core has 1 MiB of scalar memory, of which the compiler reserves some.
SCALAR_MEMORY_BYTES = 2**20 - 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The shape of the ring.

    group: pages processed at once, a power of two, at most 128 (LANES); the same for every batch and list.
    depth: buffers in the ring, each of one group; all but the one being processed are in flight.
    """

    group: int
    depth: int

    def __post_init__(self) -> None:
        powers = [1 << i for i in range(LANES.bit_length())]
        require(self.group in powers, "group", self.group, f"a power of two, at most {LANES}")
        require(self.depth >= 2, "depth", self.depth, "at least 2")

    def num_bytes(self, page_bytes: int) -> int:
        """Return the bytes of vector memory of the buffers."""
        return self.depth * self.group * page_bytes


def heuristic(group_tokens: int, page_size: int, width: int, dtype: jnp.dtype) -> RingConfig:
    """Return the ring for a group size in tokens, a page size in tokens, a token's width and the pool's dtype."""
    page_bytes = page_size * width * jnp.dtype(dtype).itemsize
    most = max(1, min(MOST_PAGES, group_tokens // page_size, RING_BYTES // 4 // page_bytes))
    group = 1 << (most.bit_length() - 1)
    ahead = -(-BYTES_IN_FLIGHT // (group * page_bytes))
    return RingConfig(group=group, depth=max(3, min(1 + ahead, RING_BYTES // (group * page_bytes))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """The scalar and vector memory of a core that a call uses, in bytes."""

    scalar: int
    vector: int


def page_bytes(pages: Array) -> int:
    """Return the bytes of vector memory of a page, with its scales if it is in 8 bits."""
    _, _, s, e = pages.shape
    scales = 4 * SUBLANES * max(s, LANES) if pages.dtype in EIGHT_BITS else 0  # full registers
    return s * e * pages.dtype.itemsize + scales


def require_pages(pages: Array) -> None:
    """Raise NotImplementedError unless a page consists of full tiles, a condition of copying it by itself."""
    rows = 32 // pages.dtype.itemsize  # of a tile: 8 in float32, 16 in bfloat16, 32 in 8 bits
    if pages.shape[2] % rows:
        raise NotImplementedError(
            f'backend "tpu" reads {pages.dtype} pages of a multiple of {rows} tokens, not {pages.shape[2]}: use "xla"'
        )


def require_memory(kind: str, needed: int, given: int, advice: str) -> None:
    """Raise NotImplementedError if a kernel needs more bytes of a memory than there are."""
    if needed > given:
        raise NotImplementedError(
            f'backend "tpu" needs {needed} of {given} bytes of {kind} memory: use "xla", {advice}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageList:
    """The pages one grid step reads.

    head: KV head of the pages, or a slice of all. num_groups: groups to process.
    count: the number of pages of group i. page: the index in the pool of page j of group i.
    """

    head: Any
    num_groups: Any
    count: Callable[[Any], Any]
    page: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Buffers "depth group ...", one semaphore per buffer, and the lists of this grid step and of the next.

    pools: what is copied of a page, pairs of an array that leads with head and page and of its buffers.
    first_ref: the buffer of the first group of this grid step's list.
    """

    pools: tuple[tuple[Any, Any], ...]
    arrived: Any
    first_ref: Any
    own: PageList
    following: PageList

    @property
    def depth(self) -> int:
        """Buffers in the ring."""
        return self.arrived.shape[0]

    def buffer(self, i: Any) -> Int[Array, ""]:
        """Return the buffer of group i of this list."""
        return lax.rem(self.first_ref[0] + i, self.depth)

    def open(self, first_step: Any) -> None:
        """Fetch the first depth - 1 groups of this list, except those that the previous step fetched."""

        @pl.when(first_step)
        def _():
            self.first_ref[0] = 0

        # a list of fewer groups leaves buffers empty that the previous step could not fill: it sees only one list ahead
        fetched = jnp.where(first_step, 0, jnp.minimum(self.own.num_groups, self.depth - 1))
        lax.fori_loop(fetched, self.depth - 1, lambda i, _: self._fetch(i), None)

    def next(self, i: Any) -> Int[Array, ""]:
        """Return the buffer of group i after its copy has ended; start the copy of group i + depth - 1."""
        self._fetch(i + self.depth - 1)  # into the buffer of group i - 1, which is free
        buffer, count = self.buffer(i), self.own.count(i)
        group = self.pools[0][1].shape[1]

        # a wait counts the copied bytes, not their source: a single wait suffices for a full group
        @pl.when(count == group)
        def _():
            for _, buffers_ref in self.pools:
                full = buffers_ref.at[buffer]
                pltpu.make_async_copy(full, full, self.arrived.at[buffer]).wait()

        @pl.when(count < group)
        def _():
            def wait_for_page(j: Any, _: None) -> None:
                for copy in self._copies(self.own.head, 0, buffer, j):
                    copy.wait()

            lax.fori_loop(0, count, wait_for_page, None)

        return buffer

    def close(self) -> None:
        """Pass the ring to the next grid step."""
        self.first_ref[0] = self.buffer(self.own.num_groups)

    def _fetch(self, i: Any) -> None:
        """Start the copies of group i, counted over this list's groups and then the next list's."""
        buffer = self.buffer(i)

        def start(pages: PageList, group: Any) -> None:
            def start_page(j: Any, _: None) -> None:
                for copy in self._copies(pages.head, pages.page(group, j), buffer, j):
                    copy.start()

            lax.fori_loop(0, pages.count(group), start_page, None)

        num_groups = self.own.num_groups
        pl.when(i < num_groups)(partial(start, self.own, i))
        pl.when(i >= num_groups)(partial(start, self.following, i - num_groups))

    def _copies(self, head: Any, page: Any, buffer: Any, j: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(pool_ref.at[head, page], buffers_ref.at[buffer, j], self.arrived.at[buffer])
            for pool_ref, buffers_ref in self.pools
        ]
