"""Prefill budgets, which select the cache blocks that a prompt segment reads: EntropyInfer's, and baselines.

The segment's own blocks are always read. A budget reads the page summaries of the earlier blocks,
for all KV heads of a layer at once, and carries state from segment to segment. Its numbers are part of the
compiled program, because a prompt is read before the per-sequence state of its laws exists.

Sources: EntropyInfer (arXiv 2606.09508), CritiPrefill (arXiv 2409.12490), FlexPrefill (Lai et al. 2025).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.bisect import above_threshold
from et_jax.control.segment import Segment, block_entropy, log_share
from et_jax.sums import total
from et_jax.types import pytree, static, value


@value
class Budget:
    """Selects the blocks of a segment. Derive from it, as a `value` whose fields are all `static`.

    A segment has `segment` tokens, the last one of a prompt the remainder. The first `dense_layers` layers, the
    last segment, segments that begin before `dense_until` tokens, and layers with a sliding window use full
    attention. The defaults are those of EntropyInfer's code.
    """

    _: dataclasses.KW_ONLY
    segment: int = static(default=512)
    dense_layers: int = static(default=1)
    dense_until: int = static(default=4096)

    def __post_init__(self) -> None:
        for name, least in (("segment", 1), ("dense_layers", 0), ("dense_until", 0)):
            self._check(name, getattr(self, name) >= least, f"at least {least}")

    def _check(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def compares_heads(self) -> bool:
        """Whether what a KV head reads depends on other heads of its layer."""
        return False

    @property
    def fewest_tokens(self) -> int:
        """Tokens of its smallest budget, which must be at least a block; 0 if it has no budget in tokens."""
        return 0

    def started(self, num_kv_heads: int) -> Any:
        """Return its state for one layer before the first segment: a tree of arrays that lead with the KV heads."""
        return {}

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read, and the state for the next segment. Invisible blocks are never read."""
        raise NotImplementedError


@value
class ConstantBudget(Budget):
    """The blocks of greatest score that have `tokens` tokens together: CritiPrefill."""

    tokens: int = static(default=2048)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("tokens", self.tokens >= 1, "at least 1")

    @property
    def fewest_tokens(self) -> int:
        """The constant budget."""
        return self.tokens

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        count = jnp.full(segment.score.shape[0], self.tokens // segment.block_size, jnp.int32)
        return greatest(segment.score, count, segment.visible), state


@pytree
class HeadBudgets:
    """The state of `EntropyBudget` per KV head: the last entropy and budget, and whether all entropies were ~0."""

    entropy: Float[Array, "*b k"]
    tokens: Float[Array, "*b k"]
    rigid: Bool[Array, "*b k"]
    begun: Bool[Array, "*b k"]


@value
class EntropyBudget(Budget):
    """More blocks for a head as its attention spreads: EntropyInfer.

    With H_s a head's entropy over the blocks before segment s, and B_0 = `tokens`:

        r_s = clip((H_s - H_(s-1)) / (H_(s-1) + 1e-9), 0, 1 + threshold),  threshold itself in the first such segment
        B_s = clip(B_(s-1) + gain B_0 (r_s - threshold), floor B_0, cap B_0)

    and the floor(B_s / block size) blocks of greatest score are read. A head is rigid, and gets B_0, until an entropy
    reaches `rigid_below`; the paper's code inspects all segments first, which chunked prefill does
    not allow. H is that of the scaled scores, over the log of the number of visible blocks.

    As printed the floor is 1: entropy only ever adds blocks to B_0. With `printed` H is that of the paper's code:
    of unscaled scores, with shares rounded to bfloat16, in nats. With `shared` every head of a layer gets the
    largest budget among them, as in that code.
    """

    tokens: int = static(default=2048)
    gain: float = static(default=0.5)
    threshold: float = static(default=0.4)
    floor: float = static(default=1.0)
    cap: float = static(default=3.0)
    rigid_below: float = static(default=1e-5)
    printed: bool = static(default=False)
    shared: bool = static(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("tokens", self.tokens >= 1, "at least 1")
        for name in ("gain", "threshold", "rigid_below"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number from 0 on")
        self._check("floor", 0 < self.floor <= 1, "above 0 and at most 1")
        self._check("cap", 1 <= self.cap < math.inf, "a number from 1 on")

    @property
    def fewest_tokens(self) -> int:
        """The floor."""
        return int(self.floor * self.tokens)

    @property
    def compares_heads(self) -> bool:
        """True if they share the largest budget."""
        return self.shared

    def started(self, num_kv_heads: int) -> HeadBudgets:
        """Return the state of heads before the first segment."""
        return HeadBudgets(
            entropy=jnp.zeros(num_kv_heads, jnp.float32),
            tokens=jnp.full(num_kv_heads, self.tokens, jnp.float32),
            rigid=jnp.ones(num_kv_heads, bool),
            begun=jnp.zeros(num_kv_heads, bool),
        )

    def choose(self, segment: Segment, state: HeadBudgets) -> tuple[Bool[Array, "k n"], HeadBudgets]:
        """Return the blocks to read, and the new state."""
        tokens, after = self.given(segment, state)
        count = jnp.floor(tokens / segment.block_size).astype(jnp.int32)
        return greatest(segment.score, count, segment.visible), after

    def given(self, segment: Segment, state: HeadBudgets) -> tuple[Float[Array, " k"], HeadBudgets]:
        """Return how many tokens each head may read, and the new state."""
        after = jax.tree.map(
            lambda new, old: jnp.where(jnp.any(segment.visible), new, old),
            self.updated(block_entropy(segment, printed=self.printed), state),
            state,
        )
        tokens = jnp.where(after.rigid, self.tokens, after.tokens)
        if self.shared:
            tokens = jnp.full_like(tokens, jnp.max(tokens))
        return tokens, after

    def updated(self, entropy: Float[Array, " k"], state: HeadBudgets) -> HeadBudgets:
        """Return the state after one more segment of this entropy."""
        growth = jnp.clip((entropy - state.entropy) / (state.entropy + 1e-9), 0.0, 1.0 + self.threshold)
        growth = jnp.where(state.begun, growth, self.threshold)
        tokens = state.tokens + self.gain * self.tokens * (growth - self.threshold)
        return HeadBudgets(
            entropy=entropy,
            tokens=jnp.clip(tokens, self.floor * self.tokens, self.cap * self.tokens),
            rigid=state.rigid & (entropy < self.rigid_below),
            begun=jnp.ones_like(state.begun),
        )


@value
class LevelBudget(ConstantBudget):
    """Blocks in proportion to a head's entropy: `tokens` times H, those of greatest score.

    H is that of `EntropyBudget`, from 0 if one block has all the mass to 1 if all are equal. The paper's budget depends
    on the change of a head's entropy from segment to segment, this one on its level.
    """

    @property
    def fewest_tokens(self) -> int:
        """0, for concentrated attention."""
        return 0

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        count = jnp.floor(self.tokens * block_entropy(segment) / segment.block_size).astype(jnp.int32)
        return greatest(segment.score, count, segment.visible), state


@value
class MassBudget(Budget):
    """The fewest blocks that leave at most a share `left` of the estimated mass unread: FlexPrefill."""

    left: float = static(default=0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("left", 0 <= self.left < 1, "from 0 to below 1")

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        share = jnp.exp(log_share(segment.score, segment.visible))

        def fine(opened: Bool[Array, "k n"]) -> Bool[Array, " k"]:
            return total(jnp.where(opened, 0.0, share)) <= self.left

        return above_threshold(jnp.where(segment.visible, share, -1.0), fine) & segment.visible, state


@pytree
class PromptRecord:
    """The state of a prompt that is read under a budget.

    `state` is the budget's own, for each layer and KV head. `blocks_read` of `blocks_held` blocks were read so far,
    over segments, layers and KV heads. `mass` sums by layer the share of its attention that the last query of each
    segment had on the blocks read, over query heads, 0 in layers with full attention; `num_probes` counts those heads
    over layers. Both are None unless requested.
    """

    state: Any
    blocks_read: Float[Array, "*b"]
    blocks_held: Float[Array, "*b"]
    mass: Float[Array, "*b l"] | None
    num_probes: Float[Array, "*b"] | None


def begun(budget: Budget, num_layers: int, num_kv_heads: int, *, probed: bool) -> PromptRecord:
    """Return the record of a prompt before its first segment."""
    zero = jnp.zeros((), jnp.float32)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_layers, *x.shape)), budget.started(num_kv_heads))
    mass, num_probes = (jnp.zeros(num_layers, jnp.float32), zero) if probed else (None, None)
    return PromptRecord(state=state, blocks_read=zero, blocks_held=zero, mass=mass, num_probes=num_probes)


def greatest(score: Float[Array, "k n"], count: Int[Array, " k"], visible: Bool[Array, " n"]) -> Bool[Array, "k n"]:
    """Return the `count` visible blocks of greatest score in each row, all if there are fewer; ties together."""
    least = jnp.finfo(jnp.float32).min

    def fine(opened: Bool[Array, "k n"]) -> Bool[Array, " k"]:
        return jnp.sum(opened & visible, axis=1) >= count

    return above_threshold(jnp.where(visible, score, least), fine) & visible & (count > 0)[:, None]
