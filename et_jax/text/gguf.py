"""The tokenizer of a GGUF file: tokens, merges or scores, and the chat template, stored among its values.

Kinds: `gpt2` merges pairs of byte pieces (`tokenizers`), after a text is split by a rule that the file names;
`llama` merges by score (SentencePiece). Source: llama.cpp, src/llama-vocab.cpp; the rules are those of the models' own
tokenizer.json.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from et_jax.errors import UsageError
from et_jax.io.gguf import read_gguf
from et_jax.io.json_files import MAX_TEMPLATE_BYTES, checked, named
from et_jax.io.schema import MAX_EOS_IDS, GgufTokenizerFile
from et_jax.text.backends import Backend, JsonBackend, SentencePieceBackend
from et_jax.text.chat import Template
from et_jax.text.tokenizer import Tokenizer

_KEYS = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens

_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDS|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDS"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_DIGITS = (r"\p{N}", _GPT2)
_RULES: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (rf"{_WORDS}|\p{{N}}|{_REST}",)),
    "tekken": (rf"{_CASED.replace('ENDS', '')}|\p{{N}}|{_CASED_REST}",),
    "gpt-4o": (rf"{_CASED.replace('ENDS', _ENDS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}",),
}
"""By the name in tokenizer.ggml.pre, the expressions that split a text in turn, each the parts of the one before."""

_FULL_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}
"""Rules under which a word that is a token is never merged from parts; a text begins with the beginning token too."""

_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end a text in every vocabulary that has them."""


def gguf_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises UsageError for an unsupported kind or rule."""
    values = read_gguf(file).values
    own = {key.removeprefix(_KEYS): value for key, value in values.items() if key.startswith(_KEYS)}
    found = checked(own, GgufTokenizerFile, f"{file}: {_KEYS}*", "fetch the file again")
    tokens, rule = found.tokens, found.pre or "default"
    types = [1] * len(tokens) if found.token_type is None else found.token_type
    if len(types) != len(tokens):
        raise UsageError(f"{file} has {len(tokens)} tokens and {len(types)} of their types; fetch the file again.")
    if found.model == "gpt2":
        backend: Backend = _byte_pairs(file, tokens, types, found.merges or [], rule)
        begins = rule in _FULL_WORDS
    elif found.model == "llama":
        backend, begins = _sentence_pieces(file, tokens, types, found.scores or [], found.add_space_prefix), True
    else:
        raise UsageError(
            f"{file}: tokenizers of the kind {named(str(found.model))} are not supported, only gpt2 and llama."
        )
    bos, eos = (_token(tokens, id) for id in (found.bos_token_id, found.eos_token_id))
    control = {text for text, kind in zip(tokens, types, strict=True) if kind == _CONTROL}
    ids = [found.eos_token_id, found.eot_token_id, found.eom_token_id]
    ids += [backend.id_of(text) for text in _END_TEXTS if text in control]
    ends = sorted({id for id in ids if id is not None and id < len(tokens)})
    template = values.get("tokenizer.chat_template")
    if isinstance(template, str) and len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise UsageError(f"{file}: the chat template has more than {MAX_TEMPLATE_BYTES} bytes; use another file.")
    named_tokens = {"bos_token": bos, "eos_token": eos}
    texts = {name: text for name, text in named_tokens.items() if text is not None}
    return Tokenizer(
        backend=backend,
        bos_id=None if bos is None else found.bos_token_id,
        eos_ids=tuple(ends[:MAX_EOS_IDS]),
        add_bos=begins if found.add_bos_token is None else found.add_bos_token,
        template=Template(template, texts) if isinstance(template, str) and template else None,
        source=str(file),
    )


def _token(tokens: Sequence[str], id: int | None) -> str | None:
    return None if id is None or id >= len(tokens) else tokens[id]


def _byte_pairs(
    file: Path, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], rule: str
) -> JsonBackend:
    """Return a backend of these tokens and merges, written as a tokenizer.json."""
    if rule not in _RULES:
        raise UsageError(f"{file}: the splitting rule {named(rule)} is not supported; use one of {', '.join(_RULES)}.")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UsageError(f"{file} has a token twice; fetch the file again.")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": token, "special": kind == _CONTROL, **plain}
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in _RULES[rule]
    ]
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [merge.split(" ", 1) for merge in merges],
        "ignore_merges": rule in _FULL_WORDS,
    }
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": model,
    }
    return JsonBackend(file, msgspec.json.encode(content))


def _sentence_pieces(
    file: Path, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], prefix: bool | None
) -> SentencePieceBackend:
    """Return a backend of the SentencePiece model that these tokens were taken from."""
    if len(scores) != len(tokens):
        raise UsageError(f"{file} has no score for each of its {len(tokens)} tokens; fetch the file again.")
    pieces = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == _USER_DEFINED:  # the converter writes spaces, SentencePiece its own symbol for them
            token = token.replace(" ", "\u2581")
        text = _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind)
        pieces.append(_field(1, text))
    trainer = _field(3, 2) + _field(35, 1)  # model_type: BPE; byte_fallback
    spaces = _field(3, int(prefix is not False)) + _field(4, 0) + _field(5, 1)  # dummy prefix; spaces stay; escaped
    model = b"".join(pieces) + _field(2, trainer) + _field(3, spaces)
    return SentencePieceBackend(file, legacy=True, content=model)


def _field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protobuf message: an integer, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
