"""What a model's files make of a text and of ids."""

import dataclasses
from collections.abc import Sequence

from et_jax.errors import UsageError
from et_jax.text.backends import Backend
from et_jax.text.chat import Message, Template
from et_jax.text.masked import Masked, encode_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back, as one model wants it.

    `eos_ids` unites what the model's config.json, its generation_config.json and its tokenizer name.
    `add_bos` None leaves the beginning of a text to the tokenizer file. A prompt is read with the special
    tokens that are written in it; a conversation is not, unless it is said.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    template: Template | None
    source: str

    @property
    def chat_template(self) -> str | None:
        """The model's chat template as it is written, if there is one."""
        return None if self.template is None else self.template.source

    @property
    def longest_token(self) -> int:
        """The most bytes of text that one id stands for, or more."""
        return self.backend.longest

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer puts around one."""
        if self.add_bos is None:
            return self.backend.encode(text, special=True)
        ids = self.backend.encode(text, special=False)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and ids beyond the vocabulary have none."""
        return self.backend.decode(ids)

    def render(self, messages: Sequence[Message], system_prompt: str | None = None) -> str:
        """Return the conversation as the model's chat template writes it, open for the assistant's answer.

        Raises UsageError where the model has no template, or the template refuses the messages.
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
        """Return the ids of `render`, whose special tokens are the template's own: none is added.

        The text of a special token that stands in a message is read as text, unless `allow_special_tokens`:
        whoever writes a message cannot end it and write the next one's.
        """
        if not allow_special_tokens:
            masked = Masked([*messages, {"content": system_prompt}], self.backend.special_texts())
            if masked.texts:
                opening = None if system_prompt is None else masked.messages[-1]["content"]
                parts = masked.parts(self.render(masked.messages[:-1], opening))
                return encode_parts(parts, self.backend)
        return self.backend.encode(self.render(messages, system_prompt), special=False)
