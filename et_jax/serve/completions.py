"""What comes back, as plain host values: measured tokens, completions, and the events of a stream."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from et_jax.io import html


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTrace:
    """One token, and the state of affairs when it was sampled.

    `entropy`, `surprisal` (nats) and `varentropy` (nats^2) are raw: the model's own. `temperature` is
    the one it was sampled at. `blocks_read` of `blocks_held` blocks were read, over layers and KV heads.
    `attention_entropy` and the least of it are as in `Signals`, None where no layer chose blocks.
    `entropic_time` (nats) runs up to this token. `cost` is what the token is charged, in bytes: its own
    blocks and summaries, and the weights divided by the sequences that its step brought a token, so it
    depends on the company, as what laws see (`Signals.cost`) does not. `flops` are its own FLOPs.
    `guard_rates` is the share of tokens so far that each counting guard has flagged. `text` is what the
    token added to the text, empty while a character is incomplete. `top` lists alternatives as (token,
    log-probability). `accepted` tokens had been drafted and cost no step of their own; the first token of each
    step says how many were `drafted` in it, and is charged for those that were not accepted. `by_small` tells whether
    the small one of two models that take turns said it, whose own the figures are then, None where one model serves; it
    is charged for all that both did since the token before. Of `audited` words of one model, which the other caught up
    with for this token, `agreed` were the likeliest to the other. `reads` is `blocks_read` by layer and KV head, as in
    `reads[layer][head]`; None where it was not asked for (`load(tell_reads=True)`), or where the small one of two
    models that take turns said the token, for its layers are others.
    """

    token: int
    text: str
    entropy: float
    varentropy: float
    temperature: float
    surprisal: float
    blocks_read: int
    blocks_held: int
    kept_mass: float
    entropic_time: float
    cost: float
    flops: float
    attention_entropy: float | None = None
    least_attention_entropy: float | None = None
    guard_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    drafted: int = 0
    accepted: bool = False
    by_small: bool | None = None
    audited: int = 0
    agreed: int = 0
    top: tuple[tuple[int, float], ...] = ()
    reads: tuple[tuple[int, ...], ...] | None = None

    @property
    def logprob(self) -> float:
        """Raw log-probability of the token, in nats."""
        return -self.surprisal


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRead:
    """What of a prompt was read, segment by segment, while it was prefilled under a budget.

    `blocks_read` of `blocks_held` blocks, over segments, layers and KV heads. `mass_kept` is the share of its attention
    that the last query of a segment had on the blocks read, in the mean over segments, layers and query heads that did
    not read everything; None where it was not asked for, or everything was read.
    """

    blocks_read: float
    blocks_held: float
    mass_kept: float | None


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of one prompt.

    `index` tells the `n` continuations of a prompt apart. `finish_reason` is "stop" (an end token or
    stop string), "length", "abort" (interrupted) or "error", explained by `error`; the text up to then
    is kept. `prompt_read` is None unless a budget chose what of the prompt was read. Of what it wrote into the cache
    compression left out `tokens_left_out` for each KV head.
    """

    prompt: str
    prompt_tokens: int
    index: int
    text: str
    token_ids: tuple[int, ...] = dataclasses.field(repr=False)
    finish_reason: FinishReason
    trace: tuple[TokenTrace, ...] = dataclasses.field(repr=False)
    error: str | None = None
    prompt_read: PromptRead | None = None
    tokens_left_out: int = 0

    @property
    def tokens_cached(self) -> int:
        """Tokens of prompt and text that the cache held for each KV head at the end; the last was never written."""
        return self.prompt_tokens + len(self.trace) - 1 - self.tokens_left_out if self.trace else 0

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Raw log-probability of every token, in nats."""
        return tuple(row.logprob for row in self.trace)

    @property
    def entropic_time(self) -> float:
        """Entropy resolved, in nats, by the clock the decoder ran."""
        return self.trace[-1].entropic_time if self.trace else 0.0

    @property
    def cost(self) -> float:
        """Bytes charged to this sequence: its own reads, and its share of the weights in every step."""
        return math.fsum(row.cost for row in self.trace)

    @property
    def flops(self) -> float:
        """FLOPs of the decode steps of this sequence."""
        return math.fsum(row.flops for row in self.trace)

    @property
    def efficiency(self) -> float:
        """Entropic time per cost, in nats per byte."""
        return self.entropic_time / self.cost if self.trace else 0.0

    @property
    def guard_rates(self) -> dict[str, float]:
        """Share of tokens that each counting guard flagged: `temperature_saturation`, `stability`."""
        return self.trace[-1].guard_rates if self.trace else {}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "prompt": self.prompt,
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "error": self.error,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "logprobs": list(self.logprobs),
            "entropic": entropic([self]),
        }

    def drawn(self) -> str:
        """Return the text coloured by entropy, its scale, and a line of figures, as HTML for `io.html.boxed`."""
        said = [html.paragraph(self.error)] if self.error else []
        return "".join([drawn(self.trace, self.prompt), html.paragraph(_ended(self)), *said])

    def _repr_html_(self) -> str:
        return html.boxed(self.drawn())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One token as it comes, or the end of a sequence.

    `text` is ready to print. `trace` is None where a sequence ends without a new token (interrupted, or
    failed); `completion` is set on its last event.
    """

    prompt_index: int
    index: int
    text: str
    trace: TokenTrace | None
    completion: Completion | None


def entropic(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return what entropy and cost came to over the continuations of one prompt, ready for JSON.

    Entropic time (nats), bytes, FLOPs and the tokens in caches are sums; shares, masses and temperatures are taken over
    all tokens; of each guard the worst rate counts.
    """
    rows = [row for completion in completions for row in completion.trace]
    time = sum(completion.entropic_time for completion in completions)
    cost = sum(completion.cost for completion in completions)
    prompts = [completion.prompt_read for completion in completions if completion.prompt_read is not None]
    rates: dict[str, float] = {}
    for completion in completions:
        rates |= {name: max(rate, rates.get(name, 0.0)) for name, rate in completion.guard_rates.items()}
    return {
        "entropic_time": time,
        "cost_bytes": cost,
        "flops": sum(completion.flops for completion in completions),
        "nats_per_byte": time / cost if rows else 0.0,
        "mean_share_read": _mean([row.blocks_read / row.blocks_held for row in rows]),
        "least_mass_kept": min((row.kept_mass for row in rows), default=None),
        "mean_attention_entropy": _mean([row.attention_entropy for row in rows if row.attention_entropy is not None]),
        "temperature_range": _range([row.temperature for row in rows]),
        "guard_rates": rates,
        "drafted_tokens": sum(row.drafted for row in rows),
        "accepted_tokens": sum(row.accepted for row in rows),
        "audited_tokens": sum(row.audited for row in rows),
        "agreed_tokens": sum(row.agreed for row in rows),
        "prompt_share_read": _mean([one.blocks_read / one.blocks_held for one in prompts if one.blocks_held]),
        "prompt_mass_kept": _mean([one.mass_kept for one in prompts if one.mass_kept is not None]),
        "tokens_cached": sum(completion.tokens_cached for completion in completions),
        "tokens_left_out": sum(completion.tokens_left_out for completion in completions),
        "small_share": _mean([float(row.by_small) for row in rows if row.by_small is not None]),
    }


def figures(completions: Sequence[Completion]) -> str:
    """Return what entropy, cost and control came to, for a person to read; of completions with a token."""
    rows = [row for completion in completions for row in completion.trace]
    nats = sum(completion.entropic_time for completion in completions)
    moved = sum(completion.cost for completion in completions)
    flops = sum(completion.flops for completion in completions)
    said = [
        f"entropic time {nats:.1f} nats, cost {moved / 1e6:.1f} MB moved and {flops / 1e9:.2f} GFLOP, "
        f"{nats / moved * 1e6:.3g} nats/MB"
    ]
    held = sum(row.blocks_held for row in rows)
    if (read := sum(row.blocks_read for row in rows)) < held:
        said.append(f"read {100 * read / held:.0f}% of blocks, kept at least {min(r.kept_mass for r in rows):.3f}")
    prompts = [one.prompt_read for one in completions if one.prompt_read is not None]
    if there := sum(one.blocks_held for one in prompts):
        said.append(f"{100 * sum(one.blocks_read for one in prompts) / there:.0f}% of blocks read of the prompt")
    if kept := [one.mass_kept for one in prompts if one.mass_kept is not None]:
        said.append(f"on which was {sum(kept) / len(kept):.3f} of its attention")
    if left_out := sum(one.tokens_left_out for one in completions):
        held = sum(one.tokens_cached for one in completions)
        said.append(f"{held} of {held + left_out} tokens held in the cache")
    if drafted := sum(row.drafted for row in rows):
        said.append(f"{sum(row.accepted for row in rows)} of {drafted} drafted tokens accepted")
    if any(row.by_small is not None for row in rows):
        said.append(f"{sum(row.by_small is True for row in rows)} of {len(rows)} tokens by the small model")
    if audited := sum(row.audited for row in rows):
        said.append(f"{sum(row.agreed for row in rows)} of {audited} words of one were likeliest to the other")
    for name in rows[0].guard_rates:
        worst = max(completion.guard_rates[name] for completion in completions if completion.trace)
        said.append(f"{name} {100 * worst:.0f}% of tokens")
    return "; ".join(said)


def drawn(rows: Sequence[TokenTrace], prompt: str = "") -> str:
    """Return tokens as HTML, each on the colour of its entropy, with its figures when pointed at; and their scale."""
    entropies = [row.entropy for row in rows]
    text = html.coloured([row.text for row in rows], entropies, list(map(_title, rows)), before=prompt)
    return text + html.scale(html.top_of(entropies))


def _title(row: TokenTrace) -> str:
    """The figures of a token, a line each."""
    said = [
        f"entropy {row.entropy:.3f} nats",
        f"surprisal {row.surprisal:.3f} nats",
        f"temperature {row.temperature:.3g}",
        *([f"read {row.blocks_read} of {row.blocks_held} blocks"] if row.blocks_read < row.blocks_held else []),
        *(["a draft, accepted"] if row.accepted else []),
        *(["by the small model"] if row.by_small else []),
        *(f"token {token}: {math.exp(logprob):.1%}" for token, logprob in row.top),
    ]
    return "\n".join(said)


def _ended(completion: Completion) -> str:
    """How many tokens there are, why they end, and their figures."""
    begun = f"{len(completion.trace)} tokens ({completion.finish_reason})"
    return f"{begun}; {figures([completion])}" if completion.trace else begun


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _range(values: list[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None
