"""A sequence: a continuation of a prompt from submission to completion, and the text of its tokens."""

import dataclasses
import enum
import time
from collections.abc import Callable
from typing import Any

from et_jax.control.controller import Controller
from et_jax.decode.config import DecoderConfig
from et_jax.decode.request import Request, request
from et_jax.serve import scheduler
from et_jax.serve.completions import Completion, FinishReason, PromptRead, TokenEvent, TokenTrace
from et_jax.serve.records import NOTHING, Charge
from et_jax.serve.requests import GenerationRequest
from et_jax.text import Detokenizer, Tokenizer
from et_jax.text.grammar import Matcher
from et_jax.text.stop_strings import StopStrings

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("top_n_sigma", "min_k", "typical_p", "eta_cutoff", "top_h", "p_less"),
)
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class Status(enum.Enum):
    """The scheduling state of a sequence.

    WAITING for a slot, or in a slot for prefix pages that another sequence is filling; PREFILLING its prompt; RUNNING,
    which is decoding; SWAPPED to the host while decoding; FINISHED.
    """

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Text:
    """The text of the tokens so far, except an end that may yet become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stop)
        self.shown = ""

    def push(self, token: int) -> str:
        """Return the text that a token adds."""
        return self._show(self._stops.push(self._detokenizer.push(token)))

    def flush(self) -> str:
        """Return the text withheld so far, at the end of the sequence."""
        return self._show(self._stops.push(self._detokenizer.flush()) + self._stops.flush())

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found is not None

    def _show(self, piece: str) -> str:
        self.shown += piece
        return piece


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """Continuation `index` of request `prompt_index`, which may produce `limit` tokens.

    `laws` control it, and `adapter` is the number of its adapter, 0 for none. `prompt_ids` are the tokens of `prompt`,
    `bad_words` those of forbidden words. A grammar's `matcher` gives the tokens permitted next. `deliver` receives
    every event. `arrival` numbers submissions and `turn` first admissions; `arrived` and `admitted` are their times.
    `slot` is its slot in a replica. While it is swapped out, `row` is its row of the device state and `swapped` the
    contents of its pages. Compression dropped `left_out` of its tokens. `unpaid` is the charge of steps that brought
    it no token, which its next token pays. `prompt_read` is how much of its prompt a budget read. Its caller sets
    `abandoned` to end it: the next round of a replica does so.
    """

    request: GenerationRequest
    laws: Controller
    prompt: str
    prompt_ids: list[int]
    prompt_index: int
    index: int
    limit: int
    adapter: int = 0
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: Matcher | None = None
    text: Text
    trace: list[TokenTrace] = dataclasses.field(default_factory=list)
    status: Status = Status.WAITING
    deliver: Callable[[TokenEvent], None] = lambda _: None
    arrival: int = 0
    arrived: float = 0.0
    turn: int = 0
    admitted: float | None = None
    slot: int | None = None
    row: Any = None
    swapped: list[Any] = dataclasses.field(default_factory=list)
    prompt_read: PromptRead | None = None
    left_out: int = 0
    unpaid: Charge = NOTHING
    abandoned: bool = False

    @property
    def priority(self) -> float:
        """The priority of its request, higher is sooner."""
        return self.request.priority

    @property
    def deadline(self) -> float | None:
        """Seconds after its arrival by which it should be done."""
        return self.request.deadline

    @property
    def resumes(self) -> bool:
        """Whether it was swapped out, so that admission swaps it in."""
        return self.status is Status.SWAPPED

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the text so far, less those that compression dropped."""
        return self.num_written + 1 - self.left_out

    @property
    def num_written(self) -> int:
        """Tokens written to the cache once it decodes, those that compression dropped included."""
        return len(self.prompt_ids) + len(self.trace) - 1

    @property
    def is_ahead(self) -> bool:
        """Whether one of two models ran since its last token, and is a cached token ahead of the other."""
        return self.unpaid is not NOTHING

    @property
    def most_written(self) -> int:
        """The most tokens that it can write to the cache: all but the last that it may produce."""
        return len(self.prompt_ids) - 1 + self.limit

    @property
    def urgency(self) -> float:
        """Its current urgency, see `scheduler.urgency`."""
        return scheduler.urgency(self.priority, self.deadline, time.monotonic() - self.arrived)

    def asked(self, config: DecoderConfig) -> Request:
        """Return the request that the device receives once the prompt is in the cache."""
        params = self.request.params
        return request(
            config,
            self.prompt_ids,
            limit=self.limit,
            arrival=self.turn,
            index=self.index,
            stop_ids=self.stop_ids,
            logprobs=params.logprobs > 0,
            urgency=self.urgency,
            control=self.laws,
            num_drafted=self.request.draft_tokens,
            logit_bias=dict(params.logit_bias),
            allowed_token_ids=params.allowed_token_ids or None,
            bad_words=self.bad_words,
            min_tokens=params.min_tokens,
            constrained=self.matcher is not None,
            **{name: getattr(params, name) for name in (*_SAMPLING, *_PENALTIES)},
        )

    def take(self, row: TokenTrace, finished: bool) -> TokenEvent:
        """Add a token; the event is the last if `finished`, or if the token completes a stop string or the grammar."""
        ends_text = finished and row.token in self.stop_ids
        piece = "" if ends_text else self.text.push(row.token)
        if self.matcher is not None:
            self.matcher.take(row.token)
        elif not self.request.params.allowed_token_ids:
            row = dataclasses.replace(row, constrained_entropy=None)
        self.trace.append(dataclasses.replace(row, text=piece))
        ended = ends_text or self.text.stopped or (self.matcher is not None and self.matcher.complete)
        if not finished and not ended:
            return self._event(piece, self.trace[-1], None)
        reason = "stop" if ended else "length"
        return dataclasses.replace(self.end(reason, piece), trace=self.trace[-1])

    def end(self, reason: FinishReason, piece: str = "", error: str | None = None) -> TokenEvent:
        """End with the tokens so far; text withheld because it might have become a stop string is released."""
        rest = self.text.flush()
        if self.trace:
            self.trace[-1] = dataclasses.replace(self.trace[-1], text=self.trace[-1].text + rest)
        return self._last(reason, piece + rest, error)

    def fail(self, error: str) -> TokenEvent:
        """End with the text shown so far; withheld text is dropped, because the tokenizer itself may have failed."""
        return self._last("error", "", error)

    def _last(self, reason: FinishReason, piece: str, error: str | None) -> TokenEvent:
        self.status = Status.FINISHED
        completion = Completion(
            prompt=self.prompt,
            prompt_tokens=len(self.prompt_ids),
            index=self.index,
            text=self.text.shown,
            token_ids=tuple(row.token for row in self.trace),
            finish_reason=reason,
            trace=tuple(self.trace),
            error=error,
            prompt_read=self.prompt_read,
            tokens_left_out=self.left_out,
            min_context=self.laws.min_context,
        )
        return self._event(piece, None, completion)

    def _event(self, piece: str, trace: TokenTrace | None, completion: Completion | None) -> TokenEvent:
        return TokenEvent(
            prompt_index=self.prompt_index, index=self.index, text=piece, trace=trace, completion=completion
        )
