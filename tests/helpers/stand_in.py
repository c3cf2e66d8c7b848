"""A model of paper that serves a batch in tests: its texts are digests.

Run as a program, `stand_in.py ARGUMENTS`, it is the command line with that model.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from et_jax import generate
from et_jax.serve.completions import Completion, TokenTrace
from et_jax.serve.metrics import Metrics
from et_jax.serve.requests import GenerationRequest
from et_jax.serve.scoring import Score

LONGEST = 100  # a prompt of more characters does not fit the paper model


def trace(token: int, text: str, **changes: Any) -> TokenTrace:
    """A token of 1 nat at temperature 0.5, one block of two read, 10 bytes and 20 FLOPs, 2 nats of time a token."""
    fields = {
        "entropy": 1.0,
        "varentropy": 0.5,
        "temperature": 0.5,
        "surprisal": 0.25,
        "blocks_read": 1,
        "blocks_held": 2,
        "kept_mass": 0.9,
        "entropic_time": 2.0,
        "cost": 10.0,
        "flops": 20.0,
        "guard_rates": {"stability": 0.25},
    }
    return TokenTrace(token=token, text=text, **(fields | changes))


def completion(prompt: str, text: str, index: int = 0, **changes: Any) -> Completion:
    """A continuation whose tokens are the characters of its text."""
    rows = tuple(trace(ord(letter), letter) for letter in text)
    fields = {"finish_reason": "length", "error": None, "prompt_tokens": len(prompt), "trace": rows}
    ids = tuple(ord(letter) for letter in text)
    return Completion(prompt=prompt, index=index, text=text, token_ids=ids, **(fields | changes))


class Letters:
    """A tokenizer whose ids are code points; its chat template writes `role: content` lines."""

    chat_template = "as said"

    def chat(
        self, messages: Sequence[Any], system_prompt: str | None = None, *, allow_special_tokens: bool = False
    ) -> list[int]:
        opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return [ord(letter) for m in [*opening, *messages] for letter in f"{m['role']}: {m['content']}\n"]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class PaperModel:
    """Answers with a digest of the prompt and the sampling, out of order, `ahead` requests at a time.

    `before` is called with every request as it is taken up.
    """

    def __init__(
        self, ahead: int = 5, seconds: float = 0.0, before: Callable[[GenerationRequest], object] = lambda _: None
    ) -> None:
        self.name, self.tokenizer, self.metrics = "paper", Letters(), Metrics()
        self.ahead, self.seconds, self.before = ahead, seconds, before

    def warm_up(self) -> None:
        pass

    def as_completed(
        self,
        requests: Iterable[GenerationRequest],
        *,
        control: Any = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Completion]]:
        pending: list[tuple[int, Completion]] = []
        numbered = enumerate(requests)
        while True:
            while len(pending) < self.ahead and (following := next(numbered, None)):
                pending += [(following[0], each) for each in self.continue_(following[1])]
            if not pending:
                return
            if cancelled():
                yield from [(index, completion(each.prompt, "", finish_reason="abort")) for index, each in pending]
                return
            time.sleep(self.seconds)
            index, each = pending.pop(len(pending) * 2 // 3)
            self.metrics.finish(each.finish_reason)
            yield index, each

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Half a nat for each letter but the first, out of 2 nats."""
        return [self._score([ord(letter) for letter in text]) for text in texts]

    def _score(self, ids: list[int]) -> Score:
        half, two = np.full(len(ids), -0.5), np.full(len(ids), 2.0)
        half[0] = two[0] = np.nan
        greedy = np.zeros(len(ids), bool)
        return Score(
            token_ids=tuple(ids), num_bytes=len(ids), log_probs=half, entropy=two, varentropy=two, greedy=greedy
        )

    def continue_(self, request: GenerationRequest) -> Iterator[Completion]:
        self.before(request)
        prompt = request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(request.prompt)
        if len(prompt) > LONGEST:
            said = "The prompt is too long; shorten it."
            yield completion(prompt, "", finish_reason="error", error=said)
            return
        for index in range(request.params.n):
            text = hashlib.sha256(f"{prompt} {request.params} {index}".encode()).hexdigest()[
                : request.params.max_tokens
            ]
            yield completion(prompt, text, index)


if __name__ == "__main__":
    loaded = SimpleNamespace(load=lambda *_, **__: PaperModel(seconds=0.002))
    sys.modules["et_jax.serve.engine"] = loaded  # type: ignore[assignment]
    sys.exit(generate.main(sys.argv[1:]))
