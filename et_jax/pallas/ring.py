"""Pages copied ahead of the work, through a ring of buffers: what the paged kernels on a TPU share.

Each grid step works through a list of pages, a group at a time. While one group is worked on, the next ones
are on their way, each into a buffer of the ring, and the copies run ahead over the end of a list: during the
last groups of one grid step the first groups of the next are fetched, so that a short list does not pay for
the latency of memory. Grid steps must run in order, on one core.
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

# Each page of a group is some lines of the compiled step.
MOST_PAGES = 32
# What must be on its way for memory never to wait: bandwidth times latency, 1.6 TB/s (v6e) times about 1.5 us.
BYTES_IN_FLIGHT = 5 * 2**19
# Kernels get 16 MiB of a core's vector memory unless they ask for more; the ring takes at most half of that.
RING_BYTES = 2**23
VECTOR_MEMORY_BYTES = 2**24
# A v5e or v6e core has 1 MiB of scalar memory, of which the compiler keeps some.
SCALAR_MEMORY_BYTES = 2**20 - 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The shape of the ring.

    group: pages worked on at once, a power of two, at most 128 (LANES); the same for every batch and list.
    depth: buffers in the ring, each of one group; all but one are on their way while that one is worked on.
    """

    group: int
    depth: int

    def __post_init__(self) -> None:
        powers = [1 << i for i in range(LANES.bit_length())]
        require(self.group in powers, "group", self.group, f"a power of two, at most {LANES}")
        require(self.depth >= 2, "depth", self.depth, "at least 2")

    def num_bytes(self, page_bytes: int) -> int:
        """Return the vector memory the buffers take."""
        return self.depth * self.group * page_bytes


def heuristic(group_tokens: int, page_size: int, width: int, dtype: jnp.dtype) -> RingConfig:
    """Return the ring for groups of so many tokens, a page size in tokens, a token's width and the pool's dtype."""
    page_bytes = page_size * width * jnp.dtype(dtype).itemsize
    most = max(1, min(MOST_PAGES, group_tokens // page_size, RING_BYTES // 4 // page_bytes))
    group = 1 << (most.bit_length() - 1)
    ahead = -(-BYTES_IN_FLIGHT // (group * page_bytes))
    return RingConfig(group=group, depth=max(3, min(1 + ahead, RING_BYTES // (group * page_bytes))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a call takes of a core's scalar and vector memory, in bytes."""

    scalar: int
    vector: int


def page_bytes(pages: Array) -> int:
    """Return the vector memory that a page of tokens takes, with its scales where it is in 8 bits."""
    _, _, s, e = pages.shape
    scales = 4 * SUBLANES * max(s, LANES) if pages.dtype in EIGHT_BITS else 0  # whole registers
    return s * e * pages.dtype.itemsize + scales


def require_pages(pages: Array) -> None:
    """Raise NotImplementedError unless a page is whole tiles, which alone can be copied by itself."""
    rows = 32 // pages.dtype.itemsize  # of a tile: 8 in float32, 16 in bfloat16, 32 in 8 bits
    if pages.shape[2] % rows:
        raise NotImplementedError(
            f'backend "tpu" reads {pages.dtype} pages of a multiple of {rows} tokens, not {pages.shape[2]}: use "xla"'
        )


def require_memory(kind: str, needed: int, given: int, advice: str) -> None:
    """Raise NotImplementedError unless the bytes a kernel needs of a memory are there."""
    if needed > given:
        raise NotImplementedError(
            f'backend "tpu" would need {needed} of {given} bytes of {kind} memory: use "xla", {advice}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageList:
    """The pages one grid step reads.

    head: KV head whose pages they are. num_groups: groups to work through.
    count: how many pages group i holds. page: the place in the pool of page j of group i.
    """

    head: Any
    num_groups: Any
    count: Callable[[Any], Any]
    page: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Buffers "depth group ...", a semaphore for each of the ring, and the list of this grid step and of the next.

    pools: what is copied of a page, pairs of an array that leads with head and page and of its buffers.
    first_ref: which buffer takes the first group of this grid step's list.
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
        """Return the buffer of group i, counted from this list's first."""
        return lax.rem(self.first_ref[0] + i, self.depth)

    def open(self, first_step: Any) -> None:
        """Fetch the first depth - 1 groups from this list's first on, but for those the step before fetched."""

        @pl.when(first_step)
        def _():
            self.first_ref[0] = 0

        # a list of fewer groups leaves room, which the step before could not fill: it sees one list ahead
        fetched = jnp.where(first_step, 0, jnp.minimum(self.own.num_groups, self.depth - 1))
        lax.fori_loop(fetched, self.depth - 1, lambda i, _: self._fetch(i), None)

    def next(self, i: Any) -> Int[Array, ""]:
        """Return the buffer of group i, arrived; set off the group that is depth - 1 further on."""
        self._fetch(i + self.depth - 1)  # into the buffer of group i - 1, which is done with
        buffer, count = self.buffer(i), self.own.count(i)
        group = self.pools[0][1].shape[1]

        # a wait asks how much arrived, not from where: one serves a group that is full
        @pl.when(count == group)
        def _():
            for _, buffers_ref in self.pools:
                whole = buffers_ref.at[buffer]
                pltpu.make_async_copy(whole, whole, self.arrived.at[buffer]).wait()

        @pl.when(count < group)
        def _():
            def wait_for_page(j: Any, _: None) -> None:
                for copy in self._copies(0, 0, buffer, j):
                    copy.wait()

            lax.fori_loop(0, count, wait_for_page, None)

        return buffer

    def close(self) -> None:
        """Hand the ring to the next grid step."""
        self.first_ref[0] = self.buffer(self.own.num_groups)

    def _fetch(self, i: Any) -> None:
        """Start the copies of group i, counted on from this list's groups into the next list's."""
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
