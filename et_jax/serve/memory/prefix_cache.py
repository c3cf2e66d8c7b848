"""The prefix cache: an index of full prompt pages by their tokens.

Plain Python on the host. The index finds cached pages and records which are in use; `page_pool` counts them.
"""

import collections
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence


class PrefixCache:
    """Pages by the hash of their tokens and of all tokens before them, evicted in least-recently-used order.

    A page that a sequence in a slot has locked is never evicted. A page cannot be found while its predecessor is
    missing, so pages are evicted from the end of a prompt to its beginning.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # least recently used first
        self._users: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        """The number of cached pages."""
        return len(self._pages)

    @property
    def num_idle(self) -> int:
        """Cached pages that no sequence has locked, which can be evicted."""
        return len(self._pages) - len(self._users)

    def find(self, tokens: Sequence[int], most: int, adapter: int = 0) -> list[int]:
        """Return at most `most` pages of the longest cached prefix of `tokens`, computed with an adapter."""
        known = list(
            itertools.takewhile(self._pages.__contains__, itertools.islice(self._chain(tokens, adapter), most))
        )
        self._touch(known)
        return [self._pages[key] for key in known]

    def add(self, tokens: Sequence[int], pages: Sequence[int], adapter: int = 0) -> list[int]:
        """Cache `pages`, the full pages of `tokens` computed with an adapter; return those that were not cached yet.

        If other pages with the same tokens are cached already, those stay.
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
        """Add a user to each of these cached `pages`, so that they are not evicted."""
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
        """Remove and return up to `count` pages that no sequence has locked, least recently used first."""
        idle = ((key, page) for key, page in self._pages.items() if page not in self._users)
        gone = list(itertools.islice(idle, count))
        for key, _ in gone:
            del self._pages[key]
        return [page for _, page in gone]

    def _chain(self, tokens: Sequence[int], adapter: int) -> Iterator[bytes]:
        """Yield the key of every full page: a hash of its tokens and the previous key, starting from the adapter."""
        key = str(adapter).encode()
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = array("q", tokens[start : start + self._page_size]).tobytes()
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            yield key
