"""Every claim on the pages of one replica, counted in one place. Plain Python on the host.

The table of the device (`decode/pages.py`) holds what is; the pool holds what that comes to and what was promised:
the pages of the sequences in slots, those that prompts being prefilled have yet to take, the growth of the running ones
over the next steps, and the pages kept for prompts to come. The replica tells the pool what it does, and does what the
pool answers: share these pages, evict those. After every round both agree on the pages that are free.

Pages are claimed in the books before the device takes them, and may be claimed while kept pages still hold them:
`settle` says which of those must go first.
"""

import dataclasses
from collections.abc import Callable

from et_jax.serve.memory.prefix_cache import PrefixCache


@dataclasses.dataclass(kw_only=True)
class Claim:
    """What the sequence in a slot holds and may come to hold.

    `written` tokens of it were put in the cache, of which compression left out `shift`; it will never write more than
    `most`. Of its pages those in `locked` are kept too, and counted as such; it locks no other, or it could lack pages
    all by itself. `begun` sequences have asked for kept pages; `running` ones have their whole prompt in the cache, but
    for the last token.
    """

    prompt: list[int]
    most: int
    adapter: int = 0
    written: int = 0
    shift: int = 0
    locked: list[int] = dataclasses.field(default_factory=list)
    begun: bool = False
    running: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self.written - self.shift

    @property
    def next_tokens(self) -> int:
        """Tokens in the cache once its next step, or its prefill and the first step, is done."""
        return self.cached + 1 if self.running else len(self.prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressing:
    """When sequences are compressed, to `room` tokens each.

    The `point` follows from the tokens of a prompt and those left out so far: a number of tokens written, None for
    never. The last `fresh_tokens` of a prompt are computed anew wherever it is served, and not shared.
    """

    room: int
    point: Callable[[int, int], int | None]
    fresh_tokens: int


class PagePool:
    """The claims on `num_pages` pages of `page_size` tokens; page 0, the null page, is one of them and never claimed.

    With `keep_prefixes` full pages of prompts are kept and shared, in whole chunks of `chunk` tokens. Slots are the
    numbers that the device knows them by. A step brings a sequence up to `most_per_step` tokens, none of them past the
    point where it is compressed, as `compressing` says.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        chunk: int,
        keep_prefixes: bool,
        most_per_step: int = 1,
        compressing: Compressing | None = None,
    ) -> None:
        self._num_pages, self._page_size, self._chunk = num_pages - 1, page_size, chunk
        self._prefixes = PrefixCache(page_size) if keep_prefixes else None
        self._most_per_step, self._compressing = most_per_step, compressing
        self._claims: dict[int, Claim] = {}

    # What there is.

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that so many tokens fill."""
        return -(-num_tokens // self._page_size)

    @property
    def num_kept(self) -> int:
        """Pages kept for prompts to come, those that sequences share among them."""
        return 0 if self._prefixes is None else len(self._prefixes)

    @property
    def num_free(self) -> int:
        """Pages neither claimed nor kept; below 0 where claims wait for kept pages to go."""
        own = sum(self.pages_for(claim.cached) - len(claim.locked) for claim in self._claims.values())
        return self._num_pages - self.num_kept - own

    @property
    def num_available(self) -> int:
        """Pages free, or kept and unlocked, less those promised to prompts that are not prefilled yet."""
        waiting = (claim for claim in self._claims.values() if not claim.running)
        promised = sum(self.pages_for(claim.next_tokens) - self.pages_for(claim.cached) for claim in waiting)
        return self.num_free + (0 if self._prefixes is None else self._prefixes.num_idle) - promised

    def written(self, slot: int) -> int:
        """Return how many tokens of a slot's sequence are in the cache, or were until it was compressed."""
        return self._claims[slot].written

    def left_out(self, slot: int) -> int:
        """Return how many tokens of a slot's sequence compression left out."""
        return self._claims[slot].shift

    def num_held(self, slot: int) -> int:
        """Return the pages of a slot, shared ones among them."""
        return self.pages_for(self._claims[slot].cached)

    def num_freed(self, slot: int) -> int:
        """Return how many pages, held or promised, are there for others once a slot is released."""
        claim = self._claims[slot]
        shared = 0 if self._prefixes is None else self._prefixes.num_shared(claim.locked)
        return self.pages_for(claim.next_tokens) - shared

    @property
    def keeps_prefixes(self) -> bool:
        """Whether pages of prompts are kept at all."""
        return self._prefixes is not None

    def kept_of(self, prompt: list[int], adapter: int = 0) -> list[int]:
        """Return the pages kept of a prompt's beginning: whole chunks of them, none that a step would write."""
        if self._prefixes is None:
            return []
        found = self._prefixes.find(prompt, self._shareable(prompt) // self._page_size, adapter)
        per_chunk = self._chunk // self._page_size
        return found[: len(found) // per_chunk * per_chunk]

    # What sequences do.

    def admit(self, slot: int, prompt: list[int], most: int, adapter: int = 0) -> None:
        """Promise an empty slot the pages of a prompt; its sequence never writes more than `most` tokens.

        Sequences with another `adapter` share no pages with it.
        """
        self._claims[slot] = Claim(prompt=prompt, most=most, adapter=adapter)

    def swap_in(self, slot: int, prompt: list[int], most: int, written: int, adapter: int = 0) -> None:
        """Claim the pages of a running sequence that comes back to an empty slot, once `written` tokens were in it."""
        claim = Claim(prompt=prompt, most=most, adapter=adapter, written=written, begun=True, running=True)
        while (point := self._point(claim)) is not None and point <= written:
            claim.shift = point - self._room
        self._claims[slot] = claim

    def begin(self, slot: int) -> list[int] | None:
        """Return the kept pages that hold the beginning of a slot's prompt, to be shared; they are locked.

        None, and nothing changed, while the chunk after them is being prefilled for another slot: it is kept soon.
        """
        claim = self._claims[slot]
        found = self.kept_of(claim.prompt, claim.adapter)
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
        """Claim the pages of so many more tokens."""
        self._claims[slot].written += num_tokens

    def run(self, slot: int) -> None:
        """Note that the prompt of a slot is in the cache."""
        self._claims[slot].running = True

    def keep(self, slot: int, pages: list[int]) -> list[int]:
        """Keep the full pages of a slot's prompt, which are the first of `pages`; return those not kept before."""
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
        """Give up every claim of a slot; the kept pages that it shared stay kept."""
        claim = self._claims.pop(slot)
        if self._prefixes is not None:
            self._prefixes.unlock(claim.locked)

    # What is compressed.

    @property
    def steps_to_point(self) -> int | None:
        """The most steps that take no running sequence past the point of its compression; None is any number.

        They end where one may be there, if every drafted token is accepted.
        """
        running = (claim for claim in self._claims.values() if claim.running)
        left = (point - claim.written for claim in running if (point := self._point(claim)) is not None)
        return min((-(-tokens // self._most_per_step) for tokens in left), default=None)

    @property
    def due(self) -> list[int]:
        """The slots whose sequences are to be compressed now, before their next step."""
        return [slot for slot, claim in self._claims.items() if claim.running and claim.written == self._point(claim)]

    def compress(self, slot: int) -> None:
        """Give up the pages of a slot's sequence, those kept stay so, and claim those of what is left of it."""
        claim = self._claims[slot]
        if self._prefixes is not None:
            self._prefixes.unlock(claim.locked)
        claim.locked, claim.shift = [], claim.written - self._room

    @property
    def _room(self) -> int:
        return 0 if self._compressing is None else self._compressing.room

    def _point(self, claim: Claim) -> int | None:
        """The tokens written at which a sequence is compressed next; it ends before it needs to be at its last."""
        point = None if self._compressing is None else self._compressing.point(len(claim.prompt), claim.shift)
        return None if point is None or point >= claim.most else point

    # What makes room.

    def growth(self, num_steps: int) -> int:
        """Return the pages that running sequences take in so many steps at most, every drafted token accepted.

        A sequence that is compressed then gives up its pages and takes others; those that it shares give up nothing.
        """
        num_tokens = num_steps * self._most_per_step
        running = (claim for claim in self._claims.values() if claim.running)
        return sum(self._growth(claim, num_tokens) for claim in running)

    def _growth(self, claim: Claim, num_tokens: int) -> int:
        """The pages that a running sequence takes for so many tokens more, or until it ends, or is compressed."""
        point = self._point(claim)
        end = claim.most if point is None else point
        written = min(claim.written + num_tokens, end)
        held = self.pages_for(written - claim.shift)
        grown = held - self.pages_for(claim.cached)
        if point is None or written < point:
            return grown
        shared = 0 if self._prefixes is None else self._prefixes.num_shared(claim.locked)
        return grown + max(0, self.pages_for(self._room) + shared - held)

    def shortage(self, num_steps: int) -> int:
        """Return how many pages are missing, above 0, for so many steps of all that run."""
        return self.growth(num_steps) - self.num_available

    def affordable(self, num_steps: int) -> int:
        """Return how many steps to take, at least one: `num_steps`, halved until there are pages for all that run."""
        while num_steps > 1 and self.shortage(num_steps) > 0:
            num_steps //= 2
        return num_steps

    def settle(self, num_pages: int = 0) -> list[int]:
        """Return kept pages to evict, so that what is claimed and `num_pages` more are there; they are forgotten."""
        return self._evict(num_pages - self.num_free)

    def forget(self) -> list[int]:
        """Return every kept page that no sequence has locked, to be evicted; they are forgotten."""
        return self._evict(self.num_kept)

    def _evict(self, count: int) -> list[int]:
        return self._prefixes.evict(count) if self._prefixes is not None and count > 0 else []

    def _shareable(self, prompt: list[int]) -> int:
        """The tokens of a prompt that may be shared: not its last, which a step writes, nor others computed anew."""
        fresh = 1 if self._compressing is None else max(1, self._compressing.fresh_tokens)
        return max(len(prompt) - fresh, 0)
