"""One continuation of a prompt on its way: the tokens so far, and the text they make."""

import dataclasses

from et_jax.serve.requests import Completion, FinishReason, SamplingParams, TokenEvent, TokenTrace
from et_jax.text import Detokenizer, Tokenizer
from et_jax.text.stop_strings import StopStrings


class Continuation:
    """Turns tokens into text as they come, and knows when the text ends.

    `prompt_index` and `index` say which continuation of which prompt it is. It may produce `limit` tokens.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: str,
        tokens: list[int],
        prompt_index: int,
        index: int,
        limit: int,
    ) -> None:
        self.params, self.prompt, self.tokens = params, prompt, tokens
        self.prompt_index, self.index, self.limit = prompt_index, index, limit
        self.stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos_ids))
        self.text = ""
        self.trace: list[TokenTrace] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop)

    def take(self, row: TokenTrace, finished: bool) -> TokenEvent:
        """Add a token, and end if it is the last or completes a stop string."""
        ends_text = finished and row.token in self.stop_ids
        piece = "" if ends_text else self._stops.push(self._detokenizer.push(row.token))
        self.text += piece
        self.trace.append(dataclasses.replace(row, text=piece))
        if ends_text or self._stops.found is not None:
            return dataclasses.replace(self.end("stop", piece), trace=self.trace[-1])
        if finished:
            return dataclasses.replace(self.end("length", piece), trace=self.trace[-1])
        return self._event(piece, self.trace[-1], None)

    def end(self, reason: FinishReason, piece: str = "", error: str | None = None) -> TokenEvent:
        """End with what is there; text held back because it might have become a stop string is let go."""
        rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self.text, piece = self.text + rest, piece + rest
        if self.trace:
            self.trace[-1] = dataclasses.replace(self.trace[-1], text=self.trace[-1].text + rest)
        return self._last(reason, piece, error)

    def fail(self, error: str) -> TokenEvent:
        """End with the text shown so far; what is held back stays back, for the tokenizer itself may have failed."""
        return self._last("error", "", error)

    def _last(self, reason: FinishReason, piece: str, error: str | None) -> TokenEvent:
        completion = Completion(
            prompt=self.prompt,
            prompt_tokens=len(self.tokens),
            index=self.index,
            text=self.text,
            token_ids=tuple(row.token for row in self.trace),
            finish_reason=reason,
            trace=tuple(self.trace),
            error=error,
        )
        return self._event(piece, None, completion)

    def _event(self, piece: str, trace: TokenTrace | None, completion: Completion | None) -> TokenEvent:
        return TokenEvent(
            prompt_index=self.prompt_index, index=self.index, text=piece, trace=trace, completion=completion
        )
