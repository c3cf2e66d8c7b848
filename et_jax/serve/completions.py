"""What comes back, as plain host values: measured tokens, completions, and the events of a stream."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from et_jax.errors import UsageError
from et_jax.io import html, values
from et_jax.io.known import formatted, known_or_none, ratio
from et_jax.io.schema import checked
from et_jax.serve.totals import Totals

_MOST = 3.4e38  # float32, in which a device measures: sums and squares of such figures stay numbers
_MOST_COUNT = 2**53
_ROUNDED = 1e-3  # by which a log-probability of 0, or a share of 1, may be above it
_GIVE = "give what generate or read_trace returned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTrace:
    """One token, and the state of affairs when it was sampled.

    `entropy`, `surprisal` (nats) and `varentropy` (nats^2) are raw: the model's own. `temperature` is the one it was
    sampled at. `constrained_entropy` is that of the tokens that a grammar or `allowed_token_ids` left, None without
    them: what it is below `entropy` they have decided. `blocks_read` of `blocks_held` blocks were read, over layers and
    KV heads; `share_bytes` is what that moved, with the summaries and codes that were looked at to choose, over the
    bytes of all blocks held: above 1 where choosing costs more than it saves, None where two models take turns.
    `attention_entropy` and the least of it are as in `Signals`, None where no layer chose blocks. `entropic_time`
    (nats) runs up to this token. `cost` is what the token is charged, in bytes: its own blocks and summaries, and the
    weights divided by the sequences that its step brought a token, so it depends on the company, as what laws see
    (`Signals.cost`) does not. `flops` are its own FLOPs. `guard_rates` is the share of tokens so far that each counting
    guard has flagged. `text` is what the token added to the text, empty while a character is incomplete. `top` lists
    alternatives as (token, log-probability). `accepted` tokens had been drafted and cost no step of their own; the
    first token of each step says how many were `drafted` in it, and is charged for those that were not accepted.
    `by_small` tells whether the small one of two models that take turns said it, whose own the figures are then, None
    where one model serves; it is charged for all that both did since the token before. Of `audited` words of one model,
    which the other caught up with for this token, `agreed` were the likeliest to the other. `reads` is `blocks_read` by
    layer and KV head, as in `reads[layer][head]`; None where it was not asked for (`load(tell_reads=True)`), or where
    the small one of two models that take turns said the token, for its layers are others. `experts` is to how many
    experts the token before it went, over all layers, and those drafted with that; None where the model is no mixture.
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
    constrained_entropy: float | None = None
    attention_entropy: float | None = None
    least_attention_entropy: float | None = None
    share_bytes: float | None = None
    guard_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    drafted: int = 0
    accepted: bool = False
    by_small: bool | None = None
    audited: int = 0
    agreed: int = 0
    top: tuple[tuple[int, float], ...] = ()
    reads: tuple[tuple[int, ...], ...] | None = None
    experts: int | None = None

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
    compression left out `tokens_left_out` for each KV head. While it had fewer than `min_context` tokens it read
    everything, and no block was scored; None where its controller sets no such length.
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
    min_context: int | None = None

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
        """Entropic time per cost, in nats per byte; NaN where tokens cost nothing."""
        return ratio(self.entropic_time, self.cost) if self.trace else 0.0

    @property
    def guard_rates(self) -> dict[str, float]:
        """Share of tokens that each counting guard flagged: `temperature_saturation`, `stability`."""
        return self.trace[-1].guard_rates if self.trace else {}

    def checked(self) -> "Completion":
        """Return this completion. Raises UsageError, with its `error`, where it failed."""
        if self.error is not None:
            raise UsageError(self.error)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, None for figures that are no numbers. Raises UsageError as `drawn`."""
        self = checked_completion(self)
        return {
            "prompt": self.prompt,
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "error": self.error,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "logprobs": list(map(known_or_none, self.logprobs)),
            "entropic": entropic([self]),
        }

    def drawn(self) -> str:
        """Return the text coloured by entropy, its scale, and a line of figures, as HTML for `io.html.boxed`.

        Raises UsageError for a completion that no run returns, see `checked_completion`.
        """
        whole = checked_completion(self)
        said = [html.paragraph(whole.error)] if whole.error else []
        return "".join([drawn(whole.trace, whole.prompt), html.paragraph(_ended(whole)), *said])

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
    """Return what the continuations of a prompt came to, and `min_context` where they have one, ready for JSON."""
    least = {one.min_context for one in completions} - {None}
    return Totals.of(completions).to_dict() | ({"min_context": max(least)} if least else {})


def checked_completion(completion: Any) -> Completion:
    """Return a completion as plain values that can be summed and drawn, however it was made.

    Figures that are no finite numbers become NaN: they are told as missing; halves of characters become U+FFFD. Raises
    UsageError for what is no completion, where a field has another type than it says, and for figures that no run has,
    as a file or a program may make them.
    """
    if not isinstance(completion, Completion):
        raise UsageError(f"completions holds {values.shown(completion)}; {_GIVE}.")
    own = vars(completion)
    if not values.is_list(own["trace"]):
        raise UsageError(f"The field trace of a completion is {values.shown(own['trace'])}; {_GIVE}.")
    found = checked(_plain(own | {"trace": ()}), Completion, "a completion", _GIVE)
    read = found.prompt_read
    counts = [found.prompt_tokens, found.index, found.tokens_left_out, found.min_context or 0, *found.token_ids]
    counts += [] if read is None else [read.blocks_read, read.blocks_held, read.mass_kept or 0]
    if not all(0 <= count <= _MOST_COUNT for count in counts):
        raise UsageError("A completion has figures that no run has; write its trace again with --trace.")
    return dataclasses.replace(found, trace=checked_rows(own["trace"]))


def checked_rows(rows: Sequence[Any]) -> tuple[TokenTrace, ...]:
    """Return the tokens of a completion as `checked_completion` does."""
    found = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, TokenTrace):
            raise UsageError(f"Token {number} of a trace is {values.shown(row)}; {_GIVE}.")
        found.append(checked(_plain(vars(row)), TokenTrace, f"token {number}", _GIVE))
        if not _possible(found[-1]):
            raise UsageError(f"Token {number} has figures that no run has; write its trace again with --trace.")
    shapes = {tuple(map(len, row.reads)) for row in found if row.reads is not None}
    if len(shapes) > 1 or not all(shape and min(shape) == max(shape) > 0 for shape in shapes):
        raise UsageError("The reads of the tokens are figures that no run has; write its trace again with --trace.")
    return tuple(found)


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    """The fields of a value without classes of numpy and the like, NaN for no finite float, U+FFFD for no character."""

    def fit(value: Any) -> Any:
        if isinstance(value, dict):
            return {fit(name): fit(one) for name, one in value.items()}
        if isinstance(value, str):
            return html.valid_text(value)
        return math.nan if isinstance(value, float) and not math.isfinite(value) else value

    try:
        return fit(msgspec.to_builtins(own, enc_hook=values.plain, builtin_types=(bytes, bytearray, memoryview)))
    except (RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"A completion holds what is no plain value; {_GIVE}.") from error


def _possible(row: TokenTrace) -> bool:
    """Whether a run can have such figures; those that are not known, NaN, can be."""
    figures = [value for value in vars(row).values() if isinstance(value, float)]
    counts = (row.token, row.blocks_read, row.blocks_held, row.drafted, row.audited, row.agreed)
    return (
        all(not abs(figure) > _MOST for figure in figures)
        and all(0 <= count <= _MOST_COUNT for count in counts)
        and row.blocks_read <= row.blocks_held > 0
        and row.cost > 0
        and all(not (rate < 0 or rate > 1 + _ROUNDED) for rate in row.guard_rates.values())
        and all(0 <= token <= _MOST_COUNT and logprob <= _ROUNDED for token, logprob in row.top)
        and all(0 <= read <= row.blocks_held for layer in row.reads or () for read in layer)
    )


def drawn(rows: Sequence[TokenTrace], prompt: str = "") -> str:
    """Return tokens as HTML, each on the colour of its entropy, with its figures when pointed at; and their scale."""
    entropies = [row.entropy for row in rows]
    text = html.coloured([row.text for row in rows], entropies, list(map(_title, rows)), before=prompt)
    return text + html.scale(html.top_of(entropies))


def _title(row: TokenTrace) -> str:
    """The figures of a token, a line each."""
    said = [
        f"entropy {formatted(row.entropy, '.3f')} nats",
        *([f"{left:.3f} nats under the grammar"] if (left := row.constrained_entropy) is not None else []),
        f"surprisal {formatted(row.surprisal, '.3f')} nats",
        f"temperature {formatted(row.temperature, '.3g')}",
        *([f"read {row.blocks_read} of {row.blocks_held} blocks"] if row.blocks_read < row.blocks_held else []),
        *(["a draft, accepted"] if row.accepted else []),
        *(["by the small model"] if row.by_small else []),
        *(f"token {token}: {math.exp(logprob):.1%}" for token, logprob in row.top),
    ]
    return "\n".join(said)


def _ended(completion: Completion) -> str:
    """How many tokens there are, why they end, and their figures."""
    begun = f"{len(completion.trace)} tokens ({completion.finish_reason})"
    return f"{begun}; {Totals.of([completion]).described()}" if completion.trace else begun
