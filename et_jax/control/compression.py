"""When a sequence's KV cache is compressed, and to what size; `policies` rank the entries.

An entry is one cached token of one KV head of one layer. A compression keeps `budget` entries of each on average, and
drops the rest for good. The kept entries fill a *region* of full blocks, in order of position and aligned to its
end; later tokens follow the region. If heads keep different numbers of entries, the region is that of the
largest: equal budgets save memory and reads, beyond that unequal ones save only reads.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from et_jax.control.policies import POLICIES, Entries, Latent, Policy
from et_jax.types import check_numbers

_NEVER = 2**30  # tokens


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a compressed cache in blocks: the region, and what each layer keeps of it.

    `layers` has the mean number of blocks that a KV head of each layer keeps; None for a sliding-window layer, which
    keeps the last entries that the region has room for.
    """

    region: int
    layers: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """A compression of KV caches to a mean of `budget` entries per layer and KV head, as `policy` ranks them.

    A sequence is compressed once `gap` decoded tokens are in the cache, and again after every further `every` tokens
    (0: never again). A cache that still fits into its region is not compressed until it exceeds it by `every` tokens.
    The last `window` tokens are always kept, and policies rank by their queries; scores are averaged over `pooling`
    neighbours. Sources of the defaults: EntropyInfer's released settings; SnapKV (window, pooling).

    Raises ValueError for invalid numbers.
    """

    budget: int
    gap: int = 16
    window: int = 32
    pooling: int = 5
    every: int = 0
    policy: Policy = dataclasses.field(default_factory=Latent)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not isinstance(self.policy, Policy):
            raise ValueError(
                f"policy: got {type(self.policy).__name__}, wanted a Policy; see POLICIES for those by name"
            )
        for name, least in (("gap", 0), ("every", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least {least}")
        if self.budget <= self.window:
            raise ValueError(f"budget: got {self.budget}, wanted more than the window of {self.window} tokens")
        if self.pooling < 1 or self.pooling % 2 == 0:
            raise ValueError(f"pooling: got {self.pooling}, wanted an odd number, as many before an entry as after it")

    @property
    def fresh_tokens(self) -> int:
        """How many last prompt tokens a policy needs the queries of; they must not come from a cached prefix."""
        return max(self.window - self.gap, 0) if self.policy.reads_queries else 0

    def layout(self, page_size: int, windows: tuple[int | None, ...]) -> Layout:
        """Return the layout in blocks of `page_size` tokens for layers with these sliding windows.

        Raises ValueError if the budget is not a multiple of the block size, or is below a sliding window.
        """
        if self.budget % page_size:
            raise ValueError(f"budget: got {self.budget}, wanted a multiple of page_size = {page_size}")
        blocks, least = self.budget // page_size, -(-self.window // page_size)
        full = sum(window is None for window in windows)
        each = self.policy.layer_blocks(blocks, least, full) if full else ()
        region = self.policy.region(each) if full else blocks
        widest = max((window for window in windows if window is not None), default=0)
        if region * page_size < widest:
            raise ValueError(f"budget: got {self.budget}, wanted at least the model's sliding window of {widest}")
        rest = iter(each)
        return Layout(region=region, layers=tuple(next(rest) if window is None else None for window in windows))

    def point(self, num_prompt: int, shift: int, region: int) -> int | None:
        """Return the number of cached tokens of the sequence at which it is compressed next; None for never.

        Its prompt has `num_prompt` tokens, the region has room for `region`, and compressions have dropped `shift` so
        far. It depends on nothing else, in particular not on the batch.
        """
        first = num_prompt + self.gap
        if shift == 0 and first > region:
            return first
        return shift + region + self.every if self.every else None

    def until_point(
        self, num_prompt: Int[Array, "*b"], num_tokens: Int[Array, "*b"], shift: Int[Array, "*b"], region: int
    ) -> Int[Array, "*b"]:
        """Return how many tokens beyond `num_tokens` of the sequence fit into the cache before `point`.

        Below 0 past that point. More than any sequence has if it is never compressed again.
        """
        first = num_prompt + self.gap
        next_one = shift + region + self.every if self.every else jnp.full_like(shift, _NEVER)
        return jnp.where((shift == 0) & (first > region), first, next_one) - num_tokens

    def shift(self, num_prompt: int, num_tokens: int, region: int) -> int:
        """Return how many tokens have been dropped from a sequence of `num_tokens` after all its compressions."""
        shift = 0
        while (point := self.point(num_prompt, shift, region)) is not None and point <= num_tokens:
            shift = point - region
        return shift

    def most_cached(self, num_prompt: int, num_tokens: int, region: int) -> int:
        """Return the most cached tokens at any time of a sequence of `num_tokens`, `num_prompt` of them its prompt."""
        first = self.point(num_prompt, 0, region)
        if first is None or num_tokens <= first:
            return num_tokens
        left = num_tokens - first + region
        return max(first, min(left, region + self.every) if self.every else left)


def kept(entries: Entries, how: Compression, layout: Layout, page_size: int) -> Int[Array, "k m"]:
    """Return the positions of the entries that each KV head of a layer keeps, for every place of the region.

    They ascend, aligned to the region's end; -1 fills the beginning for a head that keeps fewer full blocks. Requires
    more entries than the region has room for.
    """
    k, n, _ = entries.keys.shape
    room, blocks, count = layout.region * page_size, layout.layers[entries.layer], entries.count
    if blocks is None:
        return jnp.broadcast_to(count - room + jnp.arange(room), (k, room))
    place, first = jnp.arange(n), entries.first
    score = how.policy.score(entries, how.window, how.pooling)
    before = jnp.where((place >= first[:, None]) & (place < count - how.window), score, -jnp.inf)
    each = how.policy.head_blocks(before, blocks, layout.region, how.window, page_size)
    each = jnp.minimum(each, (count - first) // page_size)
    best = jax.lax.top_k(jnp.where((place >= count - how.window) & (place < count), jnp.inf, before), room)[1]
    return jnp.sort(jnp.where(jnp.arange(room) < each[:, None] * page_size, best, -1), axis=1)


def named(name: str, budget: int, **settings: int) -> Compression:
    """Return the compression of this name, one of `POLICIES`; `settings` are fields of `Compression`.

    All policies but "latent" rank right after the prompt: their default gap is 0. Raises ValueError for other names.
    """
    if name not in POLICIES:
        raise ValueError(f"name: got {name!r}, wanted one of {', '.join(POLICIES)}")
    gap = {} if name == "latent" else {"gap": 0}
    return Compression(budget=budget, policy=POLICIES[name], **(gap | settings))
