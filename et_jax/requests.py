"""What a caller asks for and what comes back, as plain host values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from et_jax.types import UsageError

MAX_STOP_IDS = 8
MAX_LOGPROBS = 20
_FLOAT32_MAX = 3.4e38  # settings travel to the device as float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other
    penalties 0 are off. `stop` strings end the text and are left out of it; `stop_token_ids` likewise,
    beside the model's own end tokens, which `ignore_eos` disregards. `n` continuations are drawn, each
    from its own key derived from `seed`. `logprobs` asks for that many alternatives per token.

    Raises UsageError for a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, wanted: str) -> None:
            raise UsageError(f"{name} is {getattr(self, name)}; it must be {wanted}.")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not abs(value) <= _FLOAT32_MAX:
                refuse(field.name, "a finite number")
        if self.max_tokens < 1:
            refuse("max_tokens", "at least 1")
        if self.temperature < 0:
            refuse("temperature", "0 (greedy) or above")
        if self.top_k < 0:
            refuse("top_k", "0 (off) or above")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", "from 0 (off) to 1")
        if self.repetition_penalty <= 0:
            refuse("repetition_penalty", "above 0 (1 is off)")
        if not 0 <= self.seed < 2**63:
            refuse("seed", "from 0 to 2^63 - 1")
        if self.n < 1:
            refuse("n", "at least 1")
        if not 0 <= self.logprobs <= MAX_LOGPROBS:
            refuse("logprobs", f"from 0 to {MAX_LOGPROBS}")
        if isinstance(self.stop, str) or not all(self.stop):
            refuse("stop", "a tuple of non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt, a text or its token ids, how to continue it, and how urgent that is.

    Of two requests the one of higher `priority` is sooner; `deadline` is in seconds from submission.

    Raises UsageError for a priority that is no number, or a deadline that is not ahead.
    """

    prompt: str | tuple[int, ...]
    params: SamplingParams
    priority: float = 0.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not abs(self.priority) <= _FLOAT32_MAX:
            raise UsageError(f"priority is {self.priority}; it must be a finite number, higher for sooner.")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise UsageError(f"deadline is {self.deadline}; it must be a number of seconds above 0.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTrace:
    """One token, and the state of affairs when it was drawn.

    `entropy`, `surprisal` (nats) and `varentropy` (nats^2) are raw: the model's own. `temperature` is
    the one it was drawn at. `blocks_read` of `blocks_held` blocks were read, over layers and KV heads.
    `entropic_time` (nats) runs up to this token; `cost` is this token's bytes, `flops` its FLOPs.
    `guard_rates` is the share of tokens so far that each counting guard has flagged. `text` is what the
    token added to the text, empty while a character is incomplete. `top` lists alternatives as (token,
    log-probability).
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
    guard_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    top: tuple[tuple[int, float], ...] = ()

    @property
    def logprob(self) -> float:
        """Raw log-probability of the token, in nats."""
        return -self.surprisal


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of one prompt.

    `index` tells the `n` continuations of a prompt apart. `finish_reason` is "stop" (an end token or
    stop string), "length", "abort" (interrupted) or "error", explained by `error`; the text up to then
    is kept.
    """

    prompt: str
    prompt_tokens: int
    index: int
    text: str
    token_ids: tuple[int, ...] = dataclasses.field(repr=False)
    finish_reason: FinishReason
    trace: tuple[TokenTrace, ...] = dataclasses.field(repr=False)
    error: str | None = None

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
        """Bytes moved by the decode steps of this sequence."""
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

    Entropic time (nats), bytes and FLOPs are sums; shares, masses and temperatures are taken over all
    tokens; of each guard the worst rate counts.
    """
    rows = [row for completion in completions for row in completion.trace]
    time = sum(completion.entropic_time for completion in completions)
    cost = sum(completion.cost for completion in completions)
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
        "temperature_range": _range([row.temperature for row in rows]),
        "guard_rates": rates,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _range(values: list[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None
