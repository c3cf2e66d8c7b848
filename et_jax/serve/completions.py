"""Results as plain host values: token traces, completions, and the events of a stream."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from et_jax.errors import UsageError
from et_jax.io import html, values
from et_jax.io.json_files import checked
from et_jax.io.known import formatted, known_or_none, ratio
from et_jax.serve.totals import Totals

_MOST = 3.4e38  # of float32, the device's dtype: sums and squares of such figures stay finite
_MOST_COUNT = 2**53
_ROUNDED = 1e-3  # rounding error by which a log-probability may exceed 0, or a share exceed 1
_GIVE = "give what generate or read_trace returned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTrace:
    """One token, with the measurements and settings of the step that sampled it.

    `entropy`, `surprisal` (nats) and `varentropy` (nats^2) are those of the raw logits. `temperature` is that of the
    sampler. `constrained_entropy` (nats) is over the tokens that a grammar or `allowed_token_ids` permits, None without
    them. The step read `blocks_read` of `blocks_held` allocated blocks, summed over layers and KV heads. `share_bytes`
    is the bytes moved for that, with the summaries and codes scored to select them, over the bytes of all allocated
    blocks: above 1 if selection costs more than it saves, None if two models alternate. `kept_mass`,
    `attention_entropy` and `least_attention_entropy` are those of `Signals`, None where those are NaN.
    `entropic_time` (nats) is the sum up to this token. `cost` (bytes) is the token's own blocks and summaries, plus the
    weights divided by the sequences sharing the step; it depends on the batch, while `Signals.cost`, which laws see,
    does not. `flops` are its own FLOPs. `guard_rates` is the share of tokens so far that each counting guard has
    flagged. `text` is the text that the token added, empty while a character is incomplete. `top` lists alternatives as
    (token, log-probability). `accepted` tokens were drafted and required no step of their own. The first token of each
    step reports how many tokens were `drafted` in it, and is charged for the rejected ones. `by_small` reports whether
    the smaller of two alternating models produced the token, None with a single model; the figures are then that
    model's, and the token is charged for the work of both models since the previous token. Of `audited` tokens of one
    model that the other caught up with for this token, `agreed` were the other's most likely ones. `reads[layer][head]`
    is `blocks_read` by layer and KV head; None without `load(trace_reads=True)`, or if the small model, whose layers
    differ, produced the token. `experts` is the number of experts, over all layers, that the previous token and the
    tokens drafted with it used; None if the model is not a mixture.
    """

    token: int
    text: str
    entropy: float
    varentropy: float
    temperature: float
    surprisal: float
    blocks_read: int
    blocks_held: int
    kept_mass: float | None
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
    """How much of a prompt was read, segment by segment, while it was prefilled under a budget.

    `blocks_read` of `blocks_held` blocks were read, over segments, layers and KV heads. `mass_kept` is the share of
    attention mass of a segment's last query on the blocks read: the mean over segments, layers and query heads that did
    not read every block. It is None without `audit`, or if every block was read.
    """

    blocks_read: float
    blocks_held: float
    mass_kept: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unreturned:
    """The work on continuations that `best_of` sampled and did not return: `cost` in bytes, and `flops`."""

    cost: float
    flops: float


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of one prompt.

    `index` numbers the `n` continuations of a prompt. `finish_reason` is "stop" (an end token or stop string),
    "length", "abort" (interrupted) or "error", explained by `error`; the text so far is returned in each case.
    `prompt_read` is None unless the prompt was prefilled under a budget. Compression dropped `tokens_left_out` cached
    tokens per KV head. While the sequence had fewer than `min_context` tokens it read every block, without scoring
    them; None if its controller sets no such length. `unreturned` is its equal share in the work on the continuations
    that `best_of` left out; None without them.
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
    unreturned: Unreturned | None = None

    @property
    def tokens_cached(self) -> int:
        """Cached tokens per KV head at the end; the last token of the text is never written to the cache."""
        return self.prompt_tokens + len(self.trace) - 1 - self.tokens_left_out if self.trace else 0

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Raw log-probability of every token, in nats."""
        return tuple(row.logprob for row in self.trace)

    @property
    def entropic_time(self) -> float:
        """Entropy resolved, in nats, as the decoder's clock measures it."""
        return self.trace[-1].entropic_time if self.trace else 0.0

    @property
    def cost(self) -> float:
        """Bytes charged to this sequence: its own cache reads, its share of the weights in every step, `unreturned`."""
        return math.fsum(row.cost for row in self.trace) + (self.unreturned.cost if self.unreturned else 0.0)

    @property
    def flops(self) -> float:
        """FLOPs of the decode steps of this sequence, and `unreturned`."""
        return math.fsum(row.flops for row in self.trace) + (self.unreturned.flops if self.unreturned else 0.0)

    @property
    def efficiency(self) -> float:
        """Entropic time per cost, in nats per byte; NaN if the cost is 0."""
        return ratio(self.entropic_time, self.cost) if self.trace else 0.0

    @property
    def guard_rates(self) -> dict[str, float]:
        """Share of tokens that each counting guard flagged: `temperature_saturation`, `stability`."""
        return self.trace[-1].guard_rates if self.trace else {}

    def checked(self) -> "Completion":
        """Return this completion. Raises UsageError, with its `error`, if it failed."""
        if self.error is not None:
            raise UsageError(self.error)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, None for figures that are NaN. Raises UsageError as `drawn`."""
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
        one = checked_completion(self)
        said = [html.paragraph(one.error)] if one.error else []
        return "".join([drawn(one.trace, one.prompt), html.paragraph(_ended(one)), *said])

    def _repr_html_(self) -> str:
        return html.boxed(self.drawn())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One token of a stream, or the end of a sequence.

    `text` is ready to print. `trace` is None if a sequence ends without a new token (interrupted or failed).
    `completion` is set on its last event.
    """

    prompt_index: int
    index: int
    text: str
    trace: TokenTrace | None
    completion: Completion | None


def entropic(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the totals of the continuations of a prompt, and `min_context` if they have it, ready for JSON."""
    least = {one.min_context for one in completions} - {None}
    return Totals.of(completions).to_dict() | ({"min_context": max(least)} if least else {})


def checked_completion(completion: Any) -> Completion:
    """Return a completion as plain values that can be summed and drawn, however it was made.

    Figures that are not finite become NaN and are reported as missing; half surrogate pairs become U+FFFD. Raises
    UsageError for a value that is not a Completion, for a field of another type than it declares, and for figures that
    no run can have, as a file or a program may produce them.
    """
    if not isinstance(completion, Completion):
        raise UsageError(f"completions contains {values.shown(completion)}; {_GIVE}.")
    own = vars(completion)
    if not values.is_list(own["trace"]):
        raise UsageError(f"The field trace of a completion is {values.shown(own['trace'])}; {_GIVE}.")
    found = checked(_plain(own | {"trace": ()}), Completion, "a completion", _GIVE)
    read = found.prompt_read
    counts = [found.prompt_tokens, found.index, found.tokens_left_out, found.min_context or 0, *found.token_ids]
    counts += [] if read is None else [read.blocks_read, read.blocks_held, read.mass_kept or 0]
    work = () if found.unreturned is None else (found.unreturned.cost, found.unreturned.flops)
    if not all(0 <= count <= _MOST_COUNT for count in counts) or any(one < 0 or one > _MOST for one in work):
        raise UsageError("A completion has figures that no run has; write its trace again with --trace.")
    return dataclasses.replace(found, trace=checked_rows(own["trace"]))


def checked_rows(rows: Sequence[Any]) -> tuple[TokenTrace, ...]:
    """Return the token traces of a completion as `checked_completion` does."""
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
    """Return fields as plain values: numpy classes converted, floats finite or NaN, characters valid or U+FFFD."""

    def fit(value: Any) -> Any:
        if isinstance(value, dict):
            return {fit(name): fit(one) for name, one in value.items()}
        if isinstance(value, str):
            return html.valid_text(value)
        return math.nan if isinstance(value, float) and not math.isfinite(value) else value

    try:
        return fit(msgspec.to_builtins(own, enc_hook=values.plain, builtin_types=(bytes, bytearray, memoryview)))
    except (RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"A completion contains a value that is not plain; {_GIVE}.") from error


def _possible(row: TokenTrace) -> bool:
    """Return whether a run can have such figures; NaN, for unknown, is possible."""
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
    """Return tokens as HTML, each coloured by its entropy, with its figures as a tooltip, and the colour scale."""
    entropies = [row.entropy for row in rows]
    text = html.coloured([row.text for row in rows], entropies, list(map(_title, rows)), before=prompt)
    return text + html.scale(html.top_of(entropies))


def _title(row: TokenTrace) -> str:
    """Return the figures of a token, one per line."""
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
    """Return the number of tokens, the finish reason, and the totals, as one line."""
    begun = f"{len(completion.trace)} tokens ({completion.finish_reason})"
    return f"{begun}; {Totals.of([completion]).described()}" if completion.trace else begun
