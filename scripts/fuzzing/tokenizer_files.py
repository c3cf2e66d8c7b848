"""The tokenizer's files: tokenizer.json or tokenizer.model, and the four beside them, all but one as they should be."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from fuzzing.cases import ACCEPTED, Surface
from fuzzing.edits import DAMAGES, MUTATIONS, Damage, Mutation, damaged, mutated
from fuzzing.small_folder import overlay, served_model
from hypothesis import strategies as st

from et_jax.errors import UsageError
from et_jax.text import Detokenizer, Tokenizer, load_tokenizer

TEXTS = ("Once upon a time", "", " ", "a" * 3000 + "!", "🙂 é 中文\r\n\t", "<|endoftext|>", "<s> </s>", "x\0y")
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<|endoftext|>"}]
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_FILES = {
    "json": ("tokenizer.json", "tokenizer.json", *_BESIDE),
    "pattern": ("tokenizer.json",),
    "model": ("tokenizer.model", *_BESIDE),
}
# What the bundled tokenizer.json has none of: patterns, which are programs of a stranger.
_PATTERN = {
    "normalizer": {"type": "Replace", "pattern": {"Regex": "  +"}, "content": " "},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}
_SETTINGS = {
    "add_bos_token": True,
    "legacy": True,
    "model_max_length": 1000,
    "clean_up_tokenization_spaces": False,
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "additional_special_tokens": [],
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "2": {"content": "</s>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages[0]['content'] }}"}],
}
_GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": None, "temperature": 0.6}


_PATTERNS = (
    *("(a+)+$", "(a|a)*b", "(a*)*b", "^(a|aa)+$", "(?:a?){3000}a{3000}", "(.*)*x", "(?=(a+))a*b", "a{1,99999}b"),
    *("(", "[", "*", "", "\\", "(?P<n>a)(?P=n)", "\\p{Nothing}", "(?<=a+)b", "((((((((((a*)*)*)*)*)*)*)*)*)*b", "\0"),
    *(".", "a|", "(?i)A", "\\b", "^", "$", "\\G", "[^a]", "(a", "a" * 50_000, "(" * 5000 + ")" * 5000, "(?R)", "(?:)*"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to which file of which tokenizer; of "pattern" the normalizer's (0) or splitter's pattern."""

    kind: str
    file: int
    mutation: Mutation
    damage: Damage
    pattern: str


def prepare(folder: Path) -> Callable[[Case], str]:
    """Write the tokenizers, and return what runs a case."""
    model = served_model(folder / "json")
    own = model.tokenizer
    document = json.loads((folder / "json/tokenizer.json").read_text())
    pattern = {"tokenizer.json": json.dumps(document | _PATTERN).encode()}
    overlay(folder / "pattern", folder / "json", pattern)
    overlay(folder / "model", folder / "json", {"tokenizer.json": None, "tokenizer.model": _sentencepiece()})
    for name, values in (("tokenizer_config.json", _SETTINGS), ("generation_config.json", _GENERATION)):
        (folder / "model" / name).unlink()
        (folder / "model" / name).write_text(json.dumps(values))

    def run(case: Case) -> str:
        base = folder / case.kind
        name = _FILES[case.kind][case.file % len(_FILES[case.kind])]
        data = _changed((base / name).read_bytes(), name, case)
        tokenizer = load_tokenizer(overlay(folder / "changed", base, {name: data}))
        try:
            model.tokenizer = tokenizer
            use(tokenizer, model)
        finally:
            model.tokenizer = own
        return ACCEPTED

    return run


def _changed(data: bytes, name: str, case: Case) -> bytes:
    if case.kind == "pattern":
        values = json.loads(data)
        holder = values["pre_tokenizer"]["pretokenizers"][0] if case.file % 2 else values["normalizer"]
        holder["pattern"] = {"Regex": case.pattern}
        return json.dumps(values).encode()
    return mutated(data, case.mutation) if name.endswith(".json") else damaged(data, case.damage)


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
    words = [f"{a}{b} {b}{a}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrst"]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words),
        model_writer=made,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return made.getvalue()


SURFACE = Surface(
    cases=st.builds(
        Case,
        kind=st.sampled_from(("json", "json", "json", "pattern", "model")),
        file=st.integers(0, 11),
        mutation=MUTATIONS,
        damage=DAMAGES,
        pattern=st.sampled_from(_PATTERNS),
    ),
    prepare=prepare,
)
