"""The two file formats, tokenizer.json and tokenizer.model, each run by its library."""

import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from et_jax.errors import UsageError
from et_jax.io.json_files import MAX_TOKENIZER_BYTES, read_bytes
from et_jax.io.schema import TokenizerFile
from et_jax.text.expressions import check_expressions, expressions

T = TypeVar("T")

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
BARE = b"\x1a\x02\x18\x00"  # protobuf: normalizer_spec { add_dummy_prefix: false }, merged when appended
PIECE = b"\n"  # protobuf: the first byte of a SentencePiece model, and of each of its pieces
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class Panic(Exception):
    """The tokenizers library panicked during its work."""


@runtime_checkable
class Backend(Protocol):
    """The common interface of the two file formats.

    An id is *visible* if it has text of its own: neither special nor beyond the vocabulary. It is *settled*
    if no later id can change the text up to it, except an unfinished character, shown as U+FFFD. `split`
    parts a text into special ids and the text between them; `encode_plain` reads a special token's text as
    any other, `opens` if it begins the text. `longest` is an upper bound of the bytes per id.
    `pieces` are those of all visible ids, as the file writes them. All ids are below `num_ids`.
    """

    longest: int
    num_ids: int

    def encode(self, text: str, special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def id_of(self, token: str) -> int | None: ...
    def pieces(self) -> dict[int, str]: ...
    def special_texts(self) -> Collection[str]: ...
    def split(self, text: str) -> list[str | int]: ...
    def encode_plain(self, text: str, opens: bool) -> list[int]: ...
    def visible(self, id: int) -> bool: ...
    def settled(self, id: int) -> bool: ...


class JsonBackend:
    """A tokenizer.json, run by the `tokenizers` library.

    With byte fallback a run of byte pieces decodes together (to U+FFFD throughout if any of it is not
    UTF-8), so none of them is settled.
    """

    def __init__(self, file: Path, content: bytes | None = None):
        """Read `file`, or `content`, which messages call by the name of `file`."""
        import tokenizers

        content = read_bytes(file, MAX_TOKENIZER_BYTES) if content is None else content
        try:
            parts = msgspec.json.decode(content, type=TokenizerFile)
            self._tokenizer = guarded(tokenizers.Tokenizer.from_buffer, content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Panic) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{file} is not a readable tokenizer ({reason}); fetch it again.") from error
        check_expressions(file, expressions([parts.normalizer, parts.pre_tokenizer, parts.decoder]))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._specials = {id: token.content for id, token in added.items() if token.special}
        self._vocab = self._tokenizer.get_vocab() | {token.content: id for id, token in added.items()}
        self._visible_ids = frozenset(self._vocab.values()) - self._specials.keys()
        self.longest = max((len(token.encode()) for token in self._vocab), default=1)
        self.num_ids = max(self._vocab.values(), default=-1) + 1
        self.base_size = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        falls_back = "ByteFallback" in json.dumps(parts.decoder)
        self._byte_ids = frozenset(
            id for token, id in self._vocab.items() if falls_back and BYTE_PIECE.fullmatch(token)
        )
        self._lock, self._plain = threading.Lock(), None

    @property
    def written(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return self._tokenizer.to_str()

    def encode(self, text: str, special: bool) -> list[int]:
        return self._encoding(self._tokenizer, text, special).ids

    def special_texts(self) -> Collection[str]:
        return self._specials.values()

    def split(self, text: str) -> list[str | int]:
        encoding, at, parts = self._encoding(self._tokenizer, text, special=False), 0, []
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id in self._specials:
                parts += [text[at:start], id]
                at = end
        return [*parts, text[at:]]

    def encode_plain(self, text: str, opens: bool) -> list[int]:
        with self._lock:
            if self._plain is None:  # rarely needed, and the setting applies to the entire tokenizer
                try:
                    plain = guarded(type(self._tokenizer).from_str, self._tokenizer.to_str())
                except Panic as error:
                    raise UsageError(
                        f"The model's tokenizer cannot read a special token as text ({error}); allow special tokens."
                    ) from error
                plain.encode_special_tokens = True
                self._plain = plain
        return self._encoding(self._plain, text, special=False).ids

    def _encoding(self, tokenizer: Any, text: str, special: bool) -> Any:
        try:
            return guarded(tokenizer.encode, _checked(text), add_special_tokens=special)
        except Panic as error:
            raise UsageError(f"The model's tokenizer cannot read this text ({error}); shorten it.") from error

    def decode(self, ids: Sequence[int]) -> str:
        # Omitted by id: the library compares texts, and misses special tokens that its normalizer changes.
        visible = [id for id in ids if self.visible(id)]
        try:
            return guarded(self._tokenizer.decode, visible, skip_special_tokens=False)
        except Panic as error:
            raise UsageError(f"The model's tokenizer cannot write this text ({error}); use another one.") from error

    def id_of(self, token: str) -> int | None:
        return self._vocab.get(token)

    def pieces(self) -> dict[int, str]:
        return {id: token for token, id in self._vocab.items() if id not in self._specials}

    def visible(self, id: int) -> bool:
        return id in self._visible_ids

    def settled(self, id: int) -> bool:
        return id not in self._byte_ids


class SentencePieceBackend:
    """A tokenizer.model, run by the `sentencepiece` library, which does not recognise special tokens inside a text.

    The text is therefore split at them. `legacy` gives every piece the leading space of a new text, like the first
    Llama tokenizers; otherwise only a piece that opens the text has it.
    """

    def __init__(self, file: Path, legacy: bool, content: bytes | None = None):
        """Read `file`, or `content`, which messages call by the name of `file`."""
        import sentencepiece

        model = read_bytes(file, MAX_TOKENIZER_BYTES) if content is None else content
        if (known := other_format(model)) and not model.startswith(PIECE):
            raise UsageError(f"{file} is {known}, not a SentencePiece model; fetch the model's tokenizer.json.")
        try:
            self._opening = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._later = self._opening if legacy else sentencepiece.SentencePieceProcessor(model_proto=model + BARE)
            self.base_size = self.num_ids = self._opening.vocab_size()
        except (RuntimeError, SystemError) as error:
            raise UsageError(f"{file} is not a readable SentencePiece model; fetch it again.") from error
        if not model or not self.base_size:
            raise UsageError(f"{file} is not a readable SentencePiece model, it is empty; fetch it again.")
        special_ids = [id for id in range(self.base_size) if self._opening.IsControl(id) or self._opening.IsUnknown(id)]
        self._special = {self._opening.id_to_piece(id): id for id in special_ids}
        self._visible_ids = frozenset(range(self.base_size)) - set(special_ids)
        self.longest = max(len(self._opening.id_to_piece(id).encode()) for id in range(self.base_size))
        self._split = re.compile("(" + "|".join(re.escape(token) for token in self._special) + ")")

    def encode(self, text: str, special: bool) -> list[int]:
        ids = [self._opening.bos_id()] if special and self._opening.bos_id() >= 0 else []
        opens = True
        for part in self.split(_checked(text)):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids.extend(self.encode_plain(part, opens))
            opens = opens and part == ""
        return ids

    def special_texts(self) -> Collection[str]:
        return self._special.keys()

    def split(self, text: str) -> list[str | int]:
        return [self._special.get(part, part) for part in self._split.split(text)]

    def encode_plain(self, text: str, opens: bool) -> list[int]:
        return (self._opening if opens else self._later).encode(_checked(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._opening.decode([id for id in ids if self.visible(id)])

    def id_of(self, token: str) -> int | None:
        return self._special.get(token)

    def pieces(self) -> dict[int, str]:
        return {id: self._opening.id_to_piece(id) for id in self._visible_ids}

    def visible(self, id: int) -> bool:
        return id in self._visible_ids

    def settled(self, id: int) -> bool:
        return True


def other_format(content: bytes) -> str | None:
    """Return the name of a file's format, if it is one that is often mistaken for another."""
    marks = {b"GGUF": "a GGUF file", b"PK\x03\x04": "a PyTorch or zip file", b"\x80\x02": "a pickle"}
    for mark, name in marks.items():
        if content.startswith(mark):
            return name
    if content[:1] == content[2:3] == PIECE and len(content) > 3:
        return "a SentencePiece model"
    if RANKS.match(content):
        return "a tiktoken file of ranks"
    if content.lstrip()[:1] == b"{":
        return "a JSON file (a tokenizer.json?)"
    return "a link of Git LFS" if content.startswith(b"version https://git-lfs") else None


def _checked(text: str) -> str:
    """Return `text`. Raises UsageError if it has half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The text holds half of a surrogate pair; write the character whole.") from error
    return text


def guarded(call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
    """Return the result of the library's call. Raises Panic for any of its exceptions, including BaseExceptions."""
    try:
        return call(*arguments, **settings)
    except BaseException as error:
        if type(error) not in (Exception, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise Panic(" ".join(str(error).split())[:200]) from error
