"""Totals of completions: the sums from which every report about them is computed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from et_jax.io.known import Figure, formatted, known, known_or_none, mean, ratio


@runtime_checkable
class Ended(Protocol):
    """The parts of a `Completion` that `Totals` sums."""

    @property
    def trace(self) -> Sequence[Any]:
        """Its tokens, each a `TokenTrace`."""
        ...

    @property
    def prompt_read(self) -> Any:
        """How much of its prompt a budget read, a `PromptRead` or None."""
        ...

    @property
    def entropic_time(self) -> float:
        """In nats."""
        ...

    @property
    def cost(self) -> float:
        """In bytes."""
        ...

    @property
    def flops(self) -> float:
        """The FLOPs of its decode steps."""
        ...

    @property
    def guard_rates(self) -> dict[str, float]:
        """The share of tokens that each guard flagged."""
        ...

    @property
    def tokens_cached(self) -> int:
        """Tokens in its cache at the end."""
        ...

    @property
    def tokens_left_out(self) -> int:
        """Tokens that compression dropped."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over some completions and their tokens; NaN for a figure that is unknown or has no tokens.

    `entropic_time` is in nats, `cost` in bytes. `bytes_moved` of the cache and `bytes_held` are in units of a block's
    bytes, over the tokens with known figures. Entropies (nats; of attention, from 0 to 1), surprisal (nats) and the
    attention mass of a prompt are means over the tokens, or prompts, that have a value. `decided` is the share of the
    entropy of constrained tokens that their constraint removed. `by_turns` tokens come from two alternating models,
    `by_small` of them from the small model. `temperatures` are the lowest and the highest. `guard_rates` has the
    highest rate of any completion for each guard.
    """

    tokens: int
    entropic_time: Figure
    cost: Figure
    flops: Figure
    entropy: Figure
    surprisal: Figure
    constrained_entropy: Figure
    decided: Figure
    attention_entropy: Figure
    temperatures: tuple[Figure, Figure] | None
    blocks_read: int
    blocks_held: int
    bytes_moved: Figure
    bytes_held: Figure
    least_mass_kept: Figure
    prompt_blocks_read: Figure
    prompt_blocks_held: Figure
    prompt_mass_kept: Figure
    tokens_cached: int
    tokens_left_out: int
    drafted: int
    accepted: int
    by_turns: int
    by_small: int
    audited: int
    agreed: int
    guard_rates: dict[str, Figure]

    @classmethod
    def of(cls, completions: Sequence[Ended]) -> "Totals":
        """Return the totals of these completions."""
        rows = [row for completion in completions for row in completion.trace]
        prompts = [one.prompt_read for one in completions if one.prompt_read is not None]
        moved = [row for row in rows if row.share_bytes is not None]
        bound = [(row.entropy, row.constrained_entropy) for row in rows if row.constrained_entropy is not None]
        heats = known(row.temperature for row in rows)
        rates: dict[str, list[Figure | None]] = {}
        for completion in completions:
            for name, rate in completion.guard_rates.items():
                rates.setdefault(name, []).append(rate)
        return cls(
            tokens=len(rows),
            entropic_time=sum(completion.entropic_time for completion in completions),
            cost=sum(completion.cost for completion in completions),
            flops=sum(completion.flops for completion in completions),
            entropy=mean(row.entropy for row in rows),
            surprisal=mean(row.surprisal for row in rows),
            constrained_entropy=mean(left for _, left in bound),
            decided=1 - ratio(sum(left for _, left in bound), sum(full for full, _ in bound)),
            attention_entropy=mean(row.attention_entropy for row in rows),
            temperatures=(min(heats), max(heats)) if heats else None,
            blocks_read=sum(row.blocks_read for row in rows),
            blocks_held=sum(row.blocks_held for row in rows),
            bytes_moved=sum((row.share_bytes or 0.0) * row.blocks_held for row in moved),
            bytes_held=sum(row.blocks_held for row in moved),
            least_mass_kept=min(known(row.kept_mass for row in rows), default=math.nan),
            prompt_blocks_read=sum(one.blocks_read for one in prompts),
            prompt_blocks_held=sum(one.blocks_held for one in prompts),
            prompt_mass_kept=mean(one.mass_kept for one in prompts),
            tokens_cached=sum(completion.tokens_cached for completion in completions),
            tokens_left_out=sum(completion.tokens_left_out for completion in completions),
            drafted=sum(row.drafted for row in rows),
            accepted=sum(row.accepted for row in rows),
            by_turns=sum(row.by_small is not None for row in rows),
            by_small=sum(row.by_small is True for row in rows),
            audited=sum(row.audited for row in rows),
            agreed=sum(row.agreed for row in rows),
            guard_rates={name: max(known(each), default=math.nan) for name, each in rates.items()},
        )

    @property
    def efficiency(self) -> Figure:
        """Entropic time per cost, in nats per byte; 0 without tokens."""
        return ratio(self.entropic_time, self.cost) if self.tokens else 0.0

    @property
    def share_read(self) -> float:
        """The blocks read, over those allocated."""
        return ratio(self.blocks_read, self.blocks_held)

    @property
    def share_bytes(self) -> float:
        """The bytes of the cache moved, those scored to select blocks included, over those of all allocated blocks."""
        return ratio(self.bytes_moved, self.bytes_held)

    @property
    def prompt_share_read(self) -> float:
        """The blocks that prompts read under a budget, over those before their segments."""
        return ratio(self.prompt_blocks_read, self.prompt_blocks_held)

    @property
    def share_cached(self) -> float:
        """The tokens cached at the end, over these and those that compression dropped."""
        return ratio(self.tokens_cached, self.tokens_cached + self.tokens_left_out)

    @property
    def small_share(self) -> float:
        """The tokens of the small one of two alternating models, over those of both."""
        return ratio(self.by_small, self.by_turns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; None for unknown figures."""
        return {
            "entropic_time": known_or_none(self.entropic_time),
            "cost_bytes": known_or_none(self.cost),
            "flops": known_or_none(self.flops),
            "nats_per_byte": known_or_none(self.efficiency),
            "mean_entropy": known_or_none(self.entropy),
            "mean_surprisal": known_or_none(self.surprisal),
            "mean_constrained_entropy": known_or_none(self.constrained_entropy),
            "share_read": known_or_none(self.share_read),
            "share_bytes": known_or_none(self.share_bytes),
            "least_mass_kept": known_or_none(self.least_mass_kept),
            "mean_attention_entropy": known_or_none(self.attention_entropy),
            "temperature_range": None if self.temperatures is None else list(self.temperatures),
            "guard_rates": {name: rate for name, rate in self.guard_rates.items() if math.isfinite(rate)},
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "audited_tokens": self.audited,
            "agreed_tokens": self.agreed,
            "prompt_share_read": known_or_none(self.prompt_share_read),
            "prompt_mass_kept": known_or_none(self.prompt_mass_kept),
            "tokens_cached": self.tokens_cached,
            "tokens_left_out": self.tokens_left_out,
            "small_share": known_or_none(self.small_share),
        }

    def described(self) -> str:
        """Return entropy, cost and control as a readable line, for completions with at least a token."""
        said = [
            f"entropic time {formatted(self.entropic_time, '.1f')} nats, "
            f"cost {formatted(self.cost / 1e6, '.1f')} MB moved and {formatted(self.flops / 1e9, '.2f')} GFLOP, "
            f"{formatted(self.efficiency * 1e6, '.3g')} nats/MB"
        ]
        if self.blocks_read < self.blocks_held:
            share = f", {100 * self.share_bytes:.0f}% of bytes" if math.isfinite(self.share_bytes) else ""
            said.append(f"read {100 * self.share_read:.0f}% of blocks{share}")
            if math.isfinite(self.least_mass_kept):
                mass = formatted(self.least_mass_kept, ".3f")
                said[-1] += f", at the worst token {mass} of the attention mass (an estimate unless certified)"
        if math.isfinite(self.decided):
            said.append(f"{100 * self.decided:.0f}% of the entropy decided by the grammar")
        if self.prompt_blocks_held:
            said.append(f"{100 * self.prompt_share_read:.0f}% of blocks read of the prompt")
        if math.isfinite(self.prompt_mass_kept):
            said.append(f"which had {self.prompt_mass_kept:.3f} of its attention mass")
        num_tokens = self.tokens_cached + self.tokens_left_out
        counted = (
            (self.tokens_left_out, f"{self.tokens_cached} of {num_tokens} tokens in the cache"),
            (self.drafted, f"{self.accepted} of {self.drafted} drafted tokens accepted"),
            (self.by_turns, f"{self.by_small} of {self.tokens} tokens by the small model"),
            (self.audited, f"{self.agreed} of {self.audited} tokens of one model were likeliest under the other"),
        )
        said += [sentence for count, sentence in counted if count]
        said += [f"{name} {formatted(100 * worst, '.0f')}% of tokens" for name, worst in self.guard_rates.items()]
        return "; ".join(said)
