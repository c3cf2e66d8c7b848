"""A model's tokenizer: text to ids, ids to text, and chat."""

import dataclasses
from collections.abc import Sequence

from et_jax.errors import UsageError
from et_jax.text.backends import Backend
from et_jax.text.chat import Message, Template
from et_jax.text.masked import Masked, encode_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back, for one model.

    `eos_ids` is the union of those of the model's config.json, its generation_config.json and its tokenizer.
    `add_bos` None leaves the beginning of a text to the tokenizer file. Special tokens written in a prompt are
    recognised; in a conversation only if requested.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    template: Template | None
    source: str

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, if there is one."""
        return None if self.template is None else self.template.source

    @property
    def longest_token(self) -> int:
        """An upper bound of the bytes of text per id."""
        return self.backend.longest

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer adds around a text."""
        if self.add_bos is None:
            return self.backend.encode(text, special=True)
        ids = self.backend.encode(text, special=False)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and ids beyond the vocabulary have none."""
        return self.backend.decode(ids)

    def render(self, messages: Sequence[Message], system_prompt: str | None = None) -> str:
        """Return the conversation rendered by the model's chat template, open for the assistant's answer.

        Raises UsageError if the model has no template, or the template refuses the messages.
        """
        if self.template is None:
            raise UsageError(
                f"{self.source} has no chat template; use --prompt without --chat, or give a model with a template."
            )
        opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return self.template.render([*opening, *messages])

    def chat(
        self,
        messages: Sequence[Message],
        system_prompt: str | None = None,
        *,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """Return the ids of `render`, with only the template's own special tokens.

        The text of a special token in a message is read as plain text, unless `allow_special_tokens`:
        a message cannot end itself and begin the next one.
        """
        if not allow_special_tokens:
            masked = Masked([*messages, {"content": system_prompt}], self.backend.special_texts())
            if masked.texts:
                opening = None if system_prompt is None else masked.messages[-1]["content"]
                parts = masked.parts(self.render(masked.messages[:-1], opening))
                return encode_parts(parts, self.backend)
        return self.backend.encode(self.render(messages, system_prompt), special=False)
