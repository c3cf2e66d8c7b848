"""Structured output: masks of the tokens that a JSON schema, a regular expression or a choice of texts allows next.

The llguidance library (https://github.com/guidance-ai/llguidance) parses the text and computes the masks.
"""

import dataclasses
import json
import re
import threading
from collections import OrderedDict
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt32

from et_jax.errors import UsageError
from et_jax.text.backends import BYTE_PIECE, JsonBackend, Panic, guarded
from et_jax.text.tokenizer import Tokenizer

Bits = UInt32[np.ndarray, " w"]
"""A packed mask: bit i of word j says whether token 32 j + i is allowed."""

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
_MARK = "\x02"  # stands for the preceding text, and merges with no character
_MOST_KEPT = 64  # the number of most recently used grammars that stay compiled
_MOST_MULTIPLE = 10_000  # of all `multipleOf` of a schema, multiplied: the library takes time and memory in proportion


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A constraint on a text: a JSON schema, a regular expression, or a JSON list of texts to choose from.

    JSON is written as Python's `json.dumps` does: ", " and ": ", and no other space between values.
    """

    kind: Literal["json_schema", "regex", "choice"]
    text: str


class Matcher:
    """Computes the allowed next tokens of a single text, which `take` extends; `own` masks the tokens of its request.

    If the grammar allows a single continuation, its tokens, as the tokenizer encodes it, are forced. With `forces`
    False any tokens that spell the continuation are allowed.
    """

    def __init__(self, matcher: Any, own: Bits, *, forces: bool) -> None:
        self._matcher, self._own, self._forces = matcher, own, forces
        self._forced: list[int] = []  # tokens that the library has consumed, and the text does not have yet
        self._allowed: Bits | None = None  # the mask after those

    @property
    def complete(self) -> bool:
        """Whether the text is complete: no token is allowed."""
        return not self._forced and guarded(self._matcher.is_stopped)

    def ahead(self, most: int) -> tuple[list[int], Bits]:
        """Return the next forced tokens, at most `most`, and the mask after them.

        Raises UsageError if no token is allowed.
        """
        if self._allowed is None and not self._forced:
            self._look()
        forced, left = self._forced[:most], self._forced[most:]
        if left:
            return forced, self._only(left[0])
        return (forced, self._allowed) if self._allowed is not None else (forced[:-1], self._only(forced[-1]))

    def take(self, token: int) -> None:
        """Add a token to the text. Raises UsageError if it is not allowed."""
        if self._forced:
            if token != (wanted := self._forced.pop(0)):
                raise UsageError(f"The token {token} came where the grammar forces {wanted}; report this.")
            return
        self._allowed = None
        guarded(self._matcher.consume_token, token)
        self._check()

    def _look(self) -> None:
        if self._forces:
            self._forced = guarded(self._matcher.compute_ff_tokens)
            guarded(self._matcher.consume_tokens, self._forced)
            self._check()
        if self._forced and guarded(self._matcher.is_stopped):
            return
        found = np.frombuffer(guarded(self._matcher.compute_bitmask), np.uint32)[: len(self._own)]
        self._check()
        self._allowed = np.pad(found, (0, len(self._own) - len(found))) & self._own
        if not self._allowed.any():
            raise UsageError("The grammar, allowed_token_ids and bad_words together allow no next token; allow more.")

    def _only(self, token: int) -> Bits:
        bits = np.zeros_like(self._own)
        bits[token // 32] = 1 << token % 32
        return bits

    def _check(self) -> None:
        if guarded(self._matcher.is_error):
            raise UsageError(f"The grammar allows no continuation ({_reason(self._matcher)}); simplify it.")


class Grammars:
    """Compiles grammars for a tokenizer whose model has `vocab_size` tokens, and caches the last ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock, self._library, self._kept = threading.Lock(), None, OrderedDict[Grammar, Any]()

    def matcher(self, grammar: Grammar, own: Bits, *, forces: bool) -> Matcher:
        """Return a matcher of an empty text. Raises UsageError for an unsupported grammar or tokenizer."""
        with self._lock:
            try:
                found = self._kept.pop(grammar, None) or self._compiled(grammar)
                self._kept[grammar] = found
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
                copied = guarded(found.deep_copy)
            except Panic as error:
                raise UsageError(f"The {grammar.kind} cannot be followed ({error}); correct or simplify it.") from error
        within = np.full(len(own), 0xFFFFFFFF, np.uint32)
        within[-1] >>= -self._vocab_size % 32
        return Matcher(copied, own & within, forces=forces)

    def _compiled(self, grammar: Grammar) -> Any:
        import llguidance

        self._library = self._library or _library_tokenizer(self.tokenizer, self._vocab_size)
        if grammar.kind == "json_schema":
            _check_multiples(grammar.text)
            written = guarded(llguidance.LLMatcher.grammar_from_json_schema, grammar.text, defaults=_SEPARATORS)
        elif grammar.kind == "regex":
            written = guarded(llguidance.LLMatcher.grammar_from_regex, grammar.text)
        else:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
            written = guarded(llguidance.LLMatcher.grammar_from_lark, f"start: {texts}")
        limits = llguidance.LLParserLimits(verbose_errors=False)
        found = guarded(llguidance.LLMatcher, self._library, written, log_level=0, limits=limits)
        tried = guarded(found.deep_copy)
        guarded(tried.compute_bitmask)  # an unsatisfiable grammar fails only here
        if guarded(tried.is_error):
            raise Panic(_reason(tried))
        return found


def _reason(matcher: Any) -> str:
    """Return the library's error message on one line, and a plain one for an unsatisfiable grammar."""
    said = guarded(matcher.get_error).replace("<non-verbose/>", "")
    said = "no text follows it" if said.startswith("NoExtension") else said
    known = re.search(r"^error: (.*)", said, re.MULTILINE)  # of a regular expression, after the place where it is
    return " ".join((known[1] if known else said).split())[:200].rstrip(".")


def _library_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Any:
    import llguidance

    if not tokenizer.eos_ids:
        raise UsageError(
            f"{tokenizer.source} names no end token, by which a text under a grammar ends; name it in eos_token_ids."
        )
    backend = tokenizer.backend
    size = max(vocab_size, backend.num_ids)
    own = backend.written if isinstance(backend, JsonBackend) else llguidance.TokenizerWrapper(_Pieces(tokenizer, size))
    try:
        ends = [id for id in tokenizer.eos_ids if id < size]
        return guarded(llguidance.LLTokenizer, own, n_vocab=size, eos_token=ends)
    except Panic as error:
        raise UsageError(
            f"The tokenizer of {tokenizer.source} does not support grammars ({error}); leave the grammar out."
        ) from error


class _Pieces:
    """A SentencePiece model in the library's form: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._backend = tokenizer.backend
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        pieces = self._backend.pieces()
        self.special_token_ids = [id for id in range(size) if id not in pieces]
        self.tokens = [_bytes(pieces[id]) if id in pieces else b"<%d>" % id for id in range(size)]

        self._ids = {piece: id for id, piece in enumerate(self.tokens) if id in pieces}

    def __call__(self, text: str) -> list[int]:
        """Return tokens that spell a text exactly: the model's encoding if it does, otherwise the longest pieces."""
        wanted, ids = text.encode(), self._backend.encode_plain(_MARK + text, opens=False)
        while ids and not self.tokens[ids.pop(0)].endswith(_MARK.encode()):
            pass
        if b"".join(self.tokens[id] for id in ids) == wanted:
            return ids
        ids = []
        while wanted:
            piece = next((wanted[:end] for end in range(len(wanted), 0, -1) if wanted[:end] in self._ids), b"")
            if not piece:
                break
            ids.append(self._ids[piece])
            wanted = wanted[len(piece) :]
        return ids


def _bytes(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if BYTE_PIECE.fullmatch(piece) else piece.replace("\u2581", " ").encode()


def _check_multiples(schema: str) -> None:
    """Raise UsageError if the product of all `multipleOf` is too large."""
    whole, left = 1, [json.loads(schema)]
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        step = value.get("multipleOf") if isinstance(value, dict) else None
        if isinstance(step, int | float):
            try:
                whole *= max(1, int("".join(map(str, Decimal(str(step)).as_tuple().digits)).rstrip("0") or 1))
            except InvalidOperation:
                continue
    if whole > _MOST_MULTIPLE:
        raise UsageError(
            f"json_schema has multipleOf of {whole} together; write numbers whose product is {_MOST_MULTIPLE} at most."
        )
