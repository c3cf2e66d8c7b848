"""A chat template, rendered by a worker process with bounded time, memory and output."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from et_jax.errors import UsageError
from et_jax.text.worker import Stopped, Worker

Message = Mapping[str, Any]

SECONDS = 5.0  # to render one conversation; about a millisecond is usual
MAX_CHARACTERS = 4 * 2**20  # of a rendered conversation: a million tokens, seconds to encode
MAX_STOPS = 3  # in a row, after which a template is not tried again


class Template:
    """A chat template and the special tokens it may name. The worker starts with the first conversation.

    Threads may render concurrently; they take turns. Copies, also in other processes, have workers of
    their own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)
        self._worker = Worker("render.py", {"template": source, "special_tokens": self.special_tokens})
        self._lock = threading.Lock()
        self._stops = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Template, (self.source, self.special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the conversation as text, open for the assistant's answer.

        Raises UsageError if the template refuses it, writes more than `MAX_CHARACTERS`, or needs more than
        `SECONDS` or more memory than a worker has. After `MAX_STOPS` conversations in a row that had to be
        stopped the template is refused at once, so that a long job does not wait for each of its lines.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("A message must be a mapping with role and content; give a list of such.")
        question = {"messages": [dict(message) for message in messages], "seconds": SECONDS, "most": MAX_CHARACTERS}
        with self._lock:
            if self._stops >= MAX_STOPS:
                raise UsageError(
                    f"The model's chat template had to be stopped {MAX_STOPS} times in a row and is not tried again; "
                    "use --prompt or another model."
                )
            try:
                answer = self._worker.ask(question, SECONDS)
            except Stopped as error:
                self._stops += 1
                raise UsageError(
                    f"The model's chat template {error} on these messages; correct them or use --prompt."
                ) from error
            except (TypeError, ValueError, RecursionError) as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(f"The messages are not plain JSON values ({error}); write texts in them.") from error
            self._stops = 0
        if "error" in answer:
            raise UsageError(
                f"The model's chat template refuses these messages ({answer['error']}); correct them or use --prompt."
            )
        return answer["text"]
