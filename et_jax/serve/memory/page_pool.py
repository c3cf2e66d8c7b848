"""The host's accounting of all claims on the pages of a replica. Plain Python.

The device's table (`decode/pages.py`) has the actual allocation. The pool has the number of allocated and promised
pages: pages of sequences in slots, pages that prompts still require for prefill, the growth of running sequences over
the next steps, and cached prefix pages. The replica reports each operation to the pool, and shares or evicts the pages
that the pool returns. While no burst is in flight the pool and the device agree on the free pages.

The pool claims pages before the device allocates them, possibly pages that are still cached prefixes: `settle` returns
the prefix pages that must be evicted first.
"""

import dataclasses
from collections.abc import Callable

from et_jax.serve.memory.prefix_cache import PrefixCache


@dataclasses.dataclass(kw_only=True)
class Claim:
    """The pages that a slot's sequence has and may require.

    `written` of its tokens were written to the cache, of which compression dropped `shift`; it never writes more than
    `most`. If it is `ahead`, one of two models has already written the token that the other one's step writes next. Its
    pages in `locked` are also cached prefix pages, and counted as such. It locks no other pages, because it
    could then run out of pages by itself. `begun` sequences have looked up cached prefixes; `running` ones have their
    prompt in the cache, except for the last token.
    """

    prompt: list[int]
    most: int
    adapter: int = 0
    written: int = 0
    shift: int = 0
    ahead: bool = False
    locked: list[int] = dataclasses.field(default_factory=list)
    begun: bool = False
    running: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self.written + self.ahead - self.shift

    @property
    def next_tokens(self) -> int:
        """Tokens in the cache once its next step, or its prefill and the first step, is done."""
        return self.written + 1 - self.shift if self.running else len(self.prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressing:
    """When sequences are compressed, to `room` tokens each.

    `point(num_prompt, shift)` returns the number of written tokens at the next compression, None for never. The last
    `fresh_tokens` of a prompt are always recomputed, and not shared.
    """

    room: int
    point: Callable[[int, int], int | None]
    fresh_tokens: int


class PagePool:
    """The claims on `num_pages` pages of `page_size` tokens, including page 0, the null page, which is never claimed.

    With `cache_prefixes` full pages of prompts are cached and shared, in full chunks of `chunk` tokens. Slots are the
    device's slot numbers. A step produces up to `most_per_step` tokens per sequence, none of them past the point of
    its compression (`compressing`).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        chunk: int,
        cache_prefixes: bool,
        most_per_step: int = 1,
        compressing: Compressing | None = None,
    ) -> None:
        self._num_pages, self._page_size, self._chunk = num_pages - 1, page_size, chunk
        self._prefixes = PrefixCache(page_size) if cache_prefixes else None
        self._most_per_step, self._compressing = most_per_step, compressing
        self._claims: dict[int, Claim] = {}

    # Counts.

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    @property
    def num_cached(self) -> int:
        """Cached prefix pages, including those that sequences share."""
        return 0 if self._prefixes is None else len(self._prefixes)

    @property
    def num_free(self) -> int:
        """Pages neither claimed nor cached; negative while claims wait for the eviction of cached pages."""
        own = sum(self.pages_for(claim.cached) - len(claim.locked) for claim in self._claims.values())
        return self._num_pages - self.num_cached - own

    @property
    def num_available(self) -> int:
        """Pages free, or cached and unlocked, less those promised to prompts that are not prefilled yet."""
        waiting = (claim for claim in self._claims.values() if not claim.running)
        promised = sum(self.pages_for(claim.next_tokens) - self.pages_for(claim.cached) for claim in waiting)
        return self.num_free + (0 if self._prefixes is None else self._prefixes.num_idle) - promised

    def written(self, slot: int) -> int:
        """Return how many tokens of a slot's sequence were written, including those that compression dropped."""
        return self._claims[slot].written

    def left_out(self, slot: int) -> int:
        """Return how many tokens of a slot's sequence compression dropped."""
        return self._claims[slot].shift

    def num_allocated(self, slot: int) -> int:
        """Return the number of pages of a slot, including shared ones."""
        return self.pages_for(self._claims[slot].cached)

    def num_freed(self, slot: int) -> int:
        """Return how many pages, allocated or promised, become available when a slot is released."""
        claim = self._claims[slot]
        shared = 0 if self._prefixes is None else self._prefixes.num_shared(claim.locked)
        return self.pages_for(claim.next_tokens) - shared

    @property
    def has_prefix_cache(self) -> bool:
        """Whether there is a prefix cache."""
        return self._prefixes is not None

    def cached_prefix(self, prompt: list[int], adapter: int = 0) -> list[int]:
        """Return the cached pages of a prompt's prefix: full chunks, without pages that a step would write."""
        if self._prefixes is None:
            return []
        found = self._prefixes.find(prompt, self._shareable(prompt) // self._page_size, adapter)
        per_chunk = self._chunk // self._page_size
        return found[: len(found) // per_chunk * per_chunk]

    # Sequences.

    def admit(self, slot: int, prompt: list[int], most: int, adapter: int = 0) -> None:
        """Promise an empty slot the pages of a prompt; its sequence never writes more than `most` tokens.

        Sequences with different adapters share no pages.
        """
        self._claims[slot] = Claim(prompt=prompt, most=most, adapter=adapter)

    def swap_in(
        self, slot: int, prompt: list[int], most: int, written: int, adapter: int = 0, *, ahead: bool = False
    ) -> None:
        """Claim the pages of a running sequence that returns to an empty slot, with `written` tokens written so far."""
        claim = Claim(prompt=prompt, most=most, adapter=adapter, written=written, ahead=ahead, begun=True, running=True)
        while (point := self._point(claim)) is not None and point <= written:
            claim.shift = point - self._room
        self._claims[slot] = claim

    def begin(self, slot: int) -> list[int] | None:
        """Lock and return the cached pages of a slot's prompt prefix, to be shared.

        Returns None, without any change, while another slot is prefilling the next chunk, which will be cached soon.
        """
        claim = self._claims[slot]
        found = self.cached_prefix(claim.prompt, claim.adapter)
        if self._prefixes is not None:
            end = len(found) * self._page_size + self._chunk
            alike = (other for other in self._claims.values() if other.adapter == claim.adapter)
            others = (other.prompt for other in alike if other.begun and not other.running)
            usable = self._shareable(claim.prompt)
            if any(end <= min(usable, len(other) - 1) and other[:end] == claim.prompt[:end] for other in others):
                return None
            self._prefixes.lock(found)
        claim.begun, claim.locked = True, found
        claim.written = len(found) * self._page_size
        return found

    def write(self, slot: int, num_tokens: int = 1) -> None:
        """Claim the pages of `num_tokens` more tokens."""
        self._claims[slot].written += num_tokens
        self._claims[slot].ahead = False

    def put_ahead(self, slot: int) -> None:
        """Claim the page of the token that one model's step wrote ahead of the other's."""
        self._claims[slot].ahead = True

    def run(self, slot: int) -> None:
        """Record that the prompt of a slot is in the cache."""
        self._claims[slot].running = True

    def cache(self, slot: int, pages: list[int]) -> list[int]:
        """Cache the full pages of a slot's prompt, the first of `pages`; return those that were not cached yet."""
        if self._prefixes is None:
            return []
        claim = self._claims[slot]
        full = (len(claim.prompt) - 1) // self._page_size
        prompt = claim.prompt[: full * self._page_size]
        fresh = self._prefixes.add(prompt, pages[:full], claim.adapter)
        self._prefixes.lock(fresh)
        claim.locked = claim.locked + fresh
        return fresh

    def release(self, slot: int) -> None:
        """Drop every claim of a slot; the cached pages that it shared stay cached."""
        claim = self._claims.pop(slot)
        if self._prefixes is not None:
            self._prefixes.unlock(claim.locked)

    # What is compressed.

    @property
    def steps_to_point(self) -> int | None:
        """The most steps that take no running sequence past the point of its compression; None for no limit.

        It assumes that every drafted token may be accepted.
        """
        running = (claim for claim in self._claims.values() if claim.running)
        left = (point - claim.written for claim in running if (point := self._point(claim)) is not None)
        return min((-(-tokens // self._most_per_step) for tokens in left), default=None)

    @property
    def due(self) -> list[int]:
        """The slots whose sequences are to be compressed now, before their next step."""
        return [slot for slot, claim in self._claims.items() if claim.running and claim.written == self._point(claim)]

    def compress(self, slot: int) -> None:
        """Drop the claims of a slot's sequence and claim those of its compressed cache; cached pages stay cached."""
        claim = self._claims[slot]
        if self._prefixes is not None:
            self._prefixes.unlock(claim.locked)
        claim.locked, claim.shift = [], claim.written - self._room

    @property
    def _room(self) -> int:
        return 0 if self._compressing is None else self._compressing.room

    def _point(self, claim: Claim) -> int | None:
        """Return the tokens written at the next compression, None for never, or if the sequence ends by then."""
        point = None if self._compressing is None else self._compressing.point(len(claim.prompt), claim.shift)
        return None if point is None or point >= claim.most else point

    # Growth and eviction.

    def growth(self, num_steps: int) -> int:
        """Return the most pages that running sequences allocate in `num_steps` steps, with every draft accepted.

        A sequence that is compressed then frees its own pages and allocates new ones; pages that it shares stay.
        """
        num_tokens = num_steps * self._most_per_step
        running = (claim for claim in self._claims.values() if claim.running)
        return sum(self._growth(claim, num_tokens) for claim in running)

    def _growth(self, claim: Claim, num_tokens: int) -> int:
        """Return the pages that a running sequence allocates for more tokens, until it ends or is compressed."""
        point = self._point(claim)
        end = claim.most if point is None else point
        written = min(claim.written + num_tokens, end)
        allocated = self.pages_for(written - claim.shift)
        grown = allocated - self.pages_for(claim.cached)
        if point is None or written < point:
            return grown
        shared = 0 if self._prefixes is None else self._prefixes.num_shared(claim.locked)
        return grown + max(0, self.pages_for(self._room) + shared - allocated)

    def shortage(self, num_steps: int) -> int:
        """Return how many pages are missing, if above 0, for `num_steps` steps of all running sequences."""
        return self.growth(num_steps) - self.num_available

    def affordable(self, num_steps: int) -> int:
        """Return `num_steps`, halved until there are pages for all running sequences; at least 1."""
        while num_steps > 1 and self.shortage(num_steps) > 0:
            num_steps //= 2
        return num_steps

    def settle(self, num_pages: int = 0) -> list[int]:
        """Drop from the prefix cache, and return, the pages to evict for all claims and `num_pages` more pages."""
        return self._evict(num_pages - self.num_free)

    def forget(self) -> list[int]:
        """Drop from the prefix cache, and return, every page that no sequence has locked, to be evicted."""
        return self._evict(self.num_cached)

    def _evict(self, count: int) -> list[int]:
        return self._prefixes.evict(count) if self._prefixes is not None and count > 0 else []

    def _shareable(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt may be shared: not the last, which a step writes, nor recomputed ones."""
        fresh = 1 if self._compressing is None else max(1, self._compressing.fresh_tokens)
        return max(len(prompt) - fresh, 0)
