"""When a sequence's KV cache is compressed, and to what; `policies` rank what is kept.

An entry is one cached token of one KV head of one layer. A compression keeps `budget` entries of each, in the mean, and
forgets the rest for good. Those kept stand in a *region* of whole blocks, in the order of their positions and at its
end; what is decoded later stands after it. Where heads keep different numbers of entries, the region is that of the
largest: equal budgets save memory and reads, unequal ones reads alone beyond that.
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
    """What is kept of a sequence in whole blocks: a region of so many, of which each layer keeps some.

    `layers` are those that a KV head of each layer keeps in the mean; None for a layer with a sliding window, which
    keeps the last entries that the region has room for.
    """

    region: int
    layers: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """A compression of KV caches to `budget` entries for each layer and KV head, in the mean, as `policy` ranks them.

    A sequence is compressed once `gap` decoded tokens of it are in the cache, and again whenever `every` more are (0:
    never again). One that still fits into its region is left alone, until `every` tokens beyond it are there. The last
    `window` tokens are always kept, and their queries are what policies rank by; scores are averaged over `pooling`
    neighbours. Sources of the defaults: EntropyInfer's released settings; SnapKV (window, pooling).

    Raises ValueError for numbers that cannot be.
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
        """Tokens at the end of a prompt whose queries a policy reads, and which must be computed for that."""
        return max(self.window - self.gap, 0) if self.policy.reads_queries else 0

    def layout(self, page_size: int, windows: tuple[int | None, ...]) -> Layout:
        """Return what is kept in blocks of `page_size` tokens of layers with these sliding windows.

        Raises ValueError where the budget is no whole number of blocks, or below a sliding window.
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
        """Return at how many tokens of its text in the cache a sequence is compressed next; None is never.

        Its prompt has `num_prompt` tokens, the region holds `region`, and compression left out `shift` so far. It
        depends on nothing else, whatever the company.
        """
        first = num_prompt + self.gap
        if shift == 0 and first > region:
            return first
        return shift + region + self.every if self.every else None

    def until_point(
        self, num_prompt: Int[Array, "*b"], num_tokens: Int[Array, "*b"], shift: Int[Array, "*b"], region: int
    ) -> Int[Array, "*b"]:
        """Return how many tokens more than `num_tokens` of its text a sequence may have in the cache by `point`.

        Below 0 where it is past that. More than any text has where it is never compressed again.
        """
        first = num_prompt + self.gap
        next_one = shift + region + self.every if self.every else jnp.full_like(shift, _NEVER)
        return jnp.where((shift == 0) & (first > region), first, next_one) - num_tokens

    def shift(self, num_prompt: int, num_tokens: int, region: int) -> int:
        """Return how many tokens were left out of a sequence of so many once every point up to there is past."""
        shift = 0
        while (point := self.point(num_prompt, shift, region)) is not None and point <= num_tokens:
            shift = point - region
        return shift

    def most_cached(self, num_prompt: int, num_tokens: int, region: int) -> int:
        """Return the most tokens in the cache at once of a sequence of so many, `num_prompt` of them its prompt."""
        first = self.point(num_prompt, 0, region)
        if first is None or num_tokens <= first:
            return num_tokens
        left = num_tokens - first + region
        return max(first, min(left, region + self.every) if self.every else left)


def kept(entries: Entries, how: Compression, layout: Layout, page_size: int) -> Int[Array, "k m"]:
    """Return the places of the entries that each KV head of a layer keeps, for every place of the region.

    They ascend, and stand at the region's end; at its beginning -1 where a head keeps fewer: whole blocks. There must
    be more entries than the region has room for.
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

    All but "latent" rank once the prompt is read, so their gap is 0 by default. Raises ValueError for another name.
    """
    if name not in POLICIES:
        raise ValueError(f"name: got {name!r}, wanted one of {', '.join(POLICIES)}")
    gap = {} if name == "latent" else {"gap": 0}
    return Compression(budget=budget, policy=POLICIES[name], **(gap | settings))
