"""The tokenizer's files: tokenizer.json or tokenizer.model, and those beside them, one of them changed."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import sentencepiece

from et_jax.errors import UsageError
from et_jax.text import Detokenizer, Tokenizer, load_tokenizer
from scripts.fuzzing import edits
from scripts.fuzzing.small_folder import overlay, served_model
from scripts.fuzzing.watch import ACCEPTED

TEXTS = ("Once upon a time", "", " ", "a" * 3000 + "!", "🙂 é 中文\r\n\t", "<|endoftext|>", "<s> </s>", "x\0y")
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<|endoftext|>"}]
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_FILES = {"json": ("tokenizer.json", "tokenizer.json", *_BESIDE), "model": ("tokenizer.model", *_BESIDE)}
# The bundled tokenizer.json has no patterns, which are programs of a stranger.
_NORMALIZER = {"type": "Replace", "pattern": {"Regex": "  +"}, "content": " "}
_SPLIT = {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PATTERNS = edits.listed(r"""
    (a+)+$  (a|a)*b  (a*)*b  ^(a|aa)+$  (?:a?){3000}a{3000}  (.*)*x  (?=(a+))a*b  a{1,99999}b  (  [  *  \  (?:)*  (?R)
    (?P<n>a)(?P=n)  \p{Nothing}  (?<=a+)b  ((((((((((a*)*)*)*)*)*)*)*)*)*b  .  a|  (?i)A  \b  ^  $  \G  [^a]  (a
""")
_PATTERNS += ["", "\0", "a" * 50_000, "(" * 5000 + ")" * 5000]
_SETTINGS = {
    **{"add_bos_token": True, "legacy": True, "model_max_length": 1000, "clean_up_tokenization_spaces": False},
    **{"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "additional_special_tokens": []},
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "2": {"content": "</s>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages[0]['content'] }}"}],
}
_GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": None, "temperature": 0.6}


def draw(random: Random) -> dict[str, Any]:
    """Return a case: the tokenizer, the file, and its changes or the pattern of its normalizer or splitter."""
    kind = random.choice(("json", "json", "json", "model", "pattern"))
    if kind == "pattern":
        return {"kind": "json", "file": random.choice(("normalizer", "splitter")), "changes": random.choice(_PATTERNS)}
    file = random.choice(_FILES[kind])
    changes = edits.changes(random) if file.endswith(".json") else edits.damages(random)
    return {"kind": kind, "file": file, "changes": changes}


def prepare(folder: Path) -> Callable[..., str]:
    """Write the tokenizers, and return the function that runs a case."""
    model = served_model(folder / "json")
    own = model.tokenizer
    document = json.loads((folder / "json/tokenizer.json").read_text())
    files: dict[str, bytes | None] = {"tokenizer.json": None, "tokenizer.model": _sentencepiece()}
    files |= {"tokenizer_config.json": json.dumps(_SETTINGS).encode()}
    overlay(folder / "model", folder / "json", files | {"generation_config.json": json.dumps(_GENERATION).encode()})

    def with_pattern(place: str, pattern: str) -> bytes:
        normalizer, splitter = ({**one, "pattern": {"Regex": pattern}} for one in (_NORMALIZER, _SPLIT))
        used = (normalizer, _SPLIT) if place == "normalizer" else (_NORMALIZER, splitter)
        sequence = {"type": "Sequence", "pretokenizers": [used[1], _BYTES]}
        return json.dumps(document | {"normalizer": used[0], "pre_tokenizer": sequence}).encode()

    def run(kind: str, file: str, changes: Any) -> str:
        if isinstance(changes, str):
            file, data = "tokenizer.json", with_pattern(file, changes)
        else:
            data = edits.mutated((folder / kind / file).read_bytes(), changes)
        tokenizer = load_tokenizer(overlay(folder / "changed", folder / kind, {file: data}))
        try:
            model.tokenizer = tokenizer
            use(tokenizer, model)
        finally:
            model.tokenizer = own
        return ACCEPTED

    return run


def use(tokenizer: Tokenizer, model: Any) -> None:
    """Do with a tokenizer what serving does. Raises UsageError where all that it refuses is one conversation."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        spelling = Detokenizer(tokenizer)
        "".join([*map(spelling.push, ids[:200]), spelling.flush()]).encode()
    [completion] = model.generate(["Once upon a time"], max_tokens=4)
    json.dumps(completion.to_dict()).encode()
    if tokenizer.chat_template is not None:
        tokenizer.chat(MESSAGES, "Be brief")
    if completion.error is not None:
        raise UsageError(completion.error)


def _sentencepiece() -> bytes:
    """Return a small SentencePiece model, made of a few words."""
    words = iter([f"{a}{b} {b}{a}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrst"])
    made, how = io.BytesIO(), {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=words, model_writer=made, **how)
    return made.getvalue()
