"""Which pages already hold the beginning of a prompt: an index of full prompt pages by what they hold.

Plain Python on the host. The index only says where what is kept and whether a sequence uses it; `page_pool` counts.
"""

import collections
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence


class PrefixCache:
    """Pages by the hash of their tokens and of all tokens before them, the least recently used evicted first.

    A page that a sequence in a slot has locked is never evicted. One whose page before it is gone is not found
    until that one is kept again, so pages are evicted from the end of a prompt to its beginning.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # least recently used first
        self._users: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        """Pages kept."""
        return len(self._pages)

    @property
    def num_idle(self) -> int:
        """Pages kept that no sequence has locked, which can be evicted."""
        return len(self._pages) - len(self._users)

    def find(self, tokens: Sequence[int], most: int, adapter: int = 0) -> list[int]:
        """Return the pages that hold the beginning of `tokens`, read with an adapter, at most `most` of them."""
        known = list(
            itertools.takewhile(self._pages.__contains__, itertools.islice(self._chain(tokens, adapter), most))
        )
        self._touch(known)
        return [self._pages[key] for key in known]

    def add(self, tokens: Sequence[int], pages: Sequence[int], adapter: int = 0) -> list[int]:
        """Keep `pages`, which hold the full pages of `tokens`, read with an adapter; return those not kept before.

        Where other pages with the same tokens are kept already, those stay.
        """
        keys = list(self._chain(tokens, adapter))
        fresh = [(key, page) for key, page in zip(keys, pages, strict=True) if key not in self._pages]
        self._pages.update(fresh)
        self._touch(keys)
        return [page for _, page in fresh]

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Make the keys of one prompt's pages the most recently used, the first page the last to be evicted."""
        for key in reversed(keys):
            self._pages.move_to_end(key)

    def lock(self, pages: Sequence[int]) -> None:
        """Count a sequence that uses `pages`, all of them kept: they are not evicted."""
        self._users.update(pages)

    def unlock(self, pages: Sequence[int]) -> None:
        """Undo `lock`."""
        self._users.subtract(pages)
        for page in pages:
            if not self._users[page]:
                del self._users[page]

    def num_shared(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` more than one sequence has locked."""
        return sum(self._users[page] > 1 for page in pages)

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages that no sequence has locked, least recently used first, and return them."""
        idle = ((key, page) for key, page in self._pages.items() if page not in self._users)
        gone = list(itertools.islice(idle, count))
        for key, _ in gone:
            del self._pages[key]
        return [page for _, page in gone]

    def _chain(self, tokens: Sequence[int], adapter: int) -> Iterator[bytes]:
        """The key of every full page: a hash of its tokens and of the key before it; the adapter is the first."""
        key = str(adapter).encode()
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = array("q", tokens[start : start + self._page_size]).tobytes()
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            yield key
