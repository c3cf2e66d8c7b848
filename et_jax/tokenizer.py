"""Text to ids and back: tokenizer.json or tokenizer.model, chat templates, incremental detokenisation.

Special tokens are added as the tokenizer's own files say. Decoding leaves special tokens out, and keeps
every space: the option `clean_up_tokenization_spaces`, which deletes some, is not followed.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from et_jax.types import UsageError

Message = Mapping[str, Any]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
BARE = b"\x1a\x02\x18\x00"  # protobuf: normalizer_spec { add_dummy_prefix: false }, merged when appended


@runtime_checkable
class Backend(Protocol):
    """What the two file formats have in common.

    An id is *visible* if it has text of its own: neither special nor beyond the vocabulary. It is *whole*
    if no later id can change the text up to it, but for an unfinished character, shown as U+FFFD.
    `longest` is the most bytes that an id stands for, or more.
    """

    longest: int

    def encode(self, text: str, special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def id_of(self, token: str) -> int | None: ...
    def visible(self, id: int) -> bool: ...
    def whole(self, id: int) -> bool: ...


class JsonBackend:
    """A tokenizer.json, run by the `tokenizers` library.

    With byte fallback a run of byte pieces decodes together (to U+FFFD throughout if any of it is not
    UTF-8), so none of them is whole.
    """

    def __init__(self, file: Path):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"{file} is not a readable tokenizer ({error}); fetch it again.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = {id for id, token in added.items() if token.special}
        self._vocab = self._tokenizer.get_vocab() | {token.content: id for id, token in added.items()}
        self._visible_ids = frozenset(self._vocab.values()) - special_ids
        self.longest = max((len(token.encode()) for token in self._vocab), default=1)
        falls_back = "ByteFallback" in json.dumps(json.loads(file.read_bytes()).get("decoder"))
        self._byte_ids = frozenset(
            id for token, id in self._vocab.items() if falls_back and BYTE_PIECE.fullmatch(token)
        )

    def encode(self, text: str, special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        # Left out by id: the library compares texts, and misses special tokens that its normalizer changes.
        return self._tokenizer.decode([id for id in ids if self.visible(id)], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._vocab.get(token)

    def visible(self, id: int) -> bool:
        return id in self._visible_ids

    def whole(self, id: int) -> bool:
        return id not in self._byte_ids


class SentencePieceBackend:
    """A tokenizer.model, run by the `sentencepiece` library, which knows no special tokens inside a text.

    So the text is split at them. `legacy` gives every piece the leading space of a new text, as the first
    Llama tokenizers did; otherwise only a piece that opens the text has it.
    """

    def __init__(self, file: Path, legacy: bool):
        import sentencepiece

        model = file.read_bytes()
        try:
            self._opening = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._later = self._opening if legacy else sentencepiece.SentencePieceProcessor(model_proto=model + BARE)
        except RuntimeError as error:
            raise UsageError(f"{file} is not a readable SentencePiece model; fetch it again.") from error
        self.size = self._opening.vocab_size()
        special_ids = [id for id in range(self.size) if self._opening.IsControl(id) or self._opening.IsUnknown(id)]
        self._special = {self._opening.id_to_piece(id): id for id in special_ids}
        self._visible_ids = frozenset(range(self.size)) - set(special_ids)
        self.longest = max(len(self._opening.id_to_piece(id).encode()) for id in range(self.size))
        self._split = re.compile("(" + "|".join(re.escape(token) for token in self._special) + ")")

    def encode(self, text: str, special: bool) -> list[int]:
        ids = [self._opening.bos_id()] if special and self._opening.bos_id() >= 0 else []
        processor = self._opening
        for piece in self._split.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
                processor = self._later
            elif piece:
                ids.extend(processor.encode(piece))
                processor = self._later
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._opening.decode([id for id in ids if self.visible(id)])

    def id_of(self, token: str) -> int | None:
        return self._special.get(token)

    def visible(self, id: int) -> bool:
        return id in self._visible_ids

    def whole(self, id: int) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back, as one model wants it.

    `eos_ids` unites what the model's config.json, its generation_config.json and its tokenizer name.
    `add_bos` None leaves the beginning of a text to the tokenizer file.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    source: str

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
        if self.chat_template is None:
            raise UsageError(
                f"{self.source} has no chat template; use --prompt without --chat, or give a model with a template."
            )
        opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return _render(self.chat_template, [*opening, *messages], self.special_tokens)

    def chat(self, messages: Sequence[Message], system_prompt: str | None = None) -> list[int]:
        """Return the ids of `render`, whose special tokens are the template's own: none is added."""
        return self.backend.encode(self.render(messages, system_prompt), special=False)


class Detokenizer:
    """Text of ids that come one by one. The pieces from `push` and `flush` add up to `decode` of all ids.

    Text is held back while it may still change: an unfinished character (shown as U+FFFD), a run of byte
    pieces. Only the last settled id and those after it are decoded again.
    """

    UNFINISHED = 3  # bytes of a character that lacks its last one, each of which may show as a U+FFFD of its own
    KEPT, LONGEST = 12, 24  # ids decoded again while U+FFFD follows U+FFFD: up to three, of up to three bytes

    def __init__(self, tokenizer: Tokenizer):
        self._backend = tokenizer.backend
        self._window: list[int] = []
        self._shown = 0

    def push(self, id: int) -> str:
        """Return the text that became certain with `id`, which may be empty."""
        if not self._backend.visible(id):
            return ""
        self._window.append(id)
        if not self._backend.whole(id):
            return ""
        text = self._backend.decode(self._window)
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), self.UNFINISHED)
        piece = text[self._shown : len(text) - held]
        self._shown = max(self._shown, len(text) - held)
        if not held or len(self._window) > self.LONGEST:
            self._window = self._window[-self.KEPT :] if held else [id]
            self._shown = len(self._backend.decode(self._window)) - held
        return piece

    def flush(self) -> str:
        """Return what is still held back. The text ends here."""
        text = self._backend.decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer in `folder`: its tokenizer.json, or else its tokenizer.model.

    Raises UsageError where there is neither, or a file cannot be read.
    """
    folder = Path(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    add_bos = settings.get("add_bos_token")
    if (folder / "tokenizer.json").exists():
        backend = JsonBackend(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").exists():
        backend = SentencePieceBackend(folder / "tokenizer.model", settings.get("legacy") is not False)
        if any(int(id) >= backend.size for id in settings.get("added_tokens_decoder", {})):
            raise UsageError(f"{folder}/tokenizer.model lacks tokens that were added to it; fetch tokenizer.json too.")
    else:
        raise UsageError(f"{folder} has neither tokenizer.json nor tokenizer.model; fetch the tokenizer too.")

    tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(settings)
    config, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    bos_id = backend.id_of(tokens.get("bos_token", "<s>"))
    eos_ids = _as_list(config.get("eos_token_id")) + _as_list(generation.get("eos_token_id"))
    return Tokenizer(
        backend=backend,
        bos_id=config.get("bos_token_id") if bos_id is None else bos_id,
        eos_ids=tuple(sorted({*eos_ids, *_as_list(backend.id_of(tokens.get("eos_token", "</s>")))})),
        add_bos=add_bos,
        chat_template=_chat_template(folder, settings),
        special_tokens=tokens,
        source=str(folder),
    )


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have a name, `bos_token` and the like."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(file: Path) -> dict[str, Any]:
    """Return what an optional file holds; nothing where it is absent."""
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not readable JSON ({error}); fetch the file again.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} is not a JSON object; fetch the file again.")
    return values


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja, or what tokenizer_config.json holds: one template, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _render(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """Return a rendered template. It is a stranger's program: it runs in a sandbox and can change nothing."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's words for training; here its body is plain text."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own spelling)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    variables = dict(special_tokens) | {"messages": messages, "tools": None, "documents": None}
    try:
        return environment.from_string(template).render(**variables, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"The model's chat template refuses these messages ({error}); mend them or use --prompt."
        ) from error
