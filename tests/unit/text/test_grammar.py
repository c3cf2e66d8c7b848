"""Grammars against independent programs: what is written validates, and masks are those of their definition."""

import json
import re

import jsonschema
import numpy as np
import pytest
from plain_sequences import tokenizer
from test_tokenizer import byte_fallback, byte_level, sentencepiece_model
from tokenizers import Tokenizer as Library
from tokenizers import models

from et_jax.errors import UsageError
from et_jax.text import Grammar, Grammars, Tokenizer, as_tokenizer, load_tokenizer
from et_jax.text.grammar import Bits, Matcher

SIZE = 4096
ALL = np.full(SIZE // 32, 0xFFFFFFFF, np.uint32)
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["north", "south", "a/b\\é\n"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 24}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 12},
        "open": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["place", "hours", "note", "open"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer(), SIZE)


def of_schema(schema: dict) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def tokens(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def drawn(matcher: Matcher, seed: int, most: int, spelling: Tokenizer | None = None) -> tuple[str, int]:
    """A text of tokens drawn evenly from those that may come, and how many of them were forced."""
    text, forced, random = [], 0, np.random.default_rng(seed)
    while not (text and matcher.complete):
        next_, bits = matcher.ahead(most)
        assert len(next_) <= most
        forced += len(next_)
        for token in (*next_, int(random.choice(tokens(bits)))):
            matcher.take(token)
            text.append(token)
    return (spelling or tokenizer()).decode(text), forced


@pytest.mark.parametrize("forces", [True, False])
def test_texts_are_written_by_their_grammar(grammars, forces):
    for seed in range(20):
        text, forced = drawn(grammars.matcher(of_schema(SCHEMA), ALL, forces=forces), seed, most=seed % 5)
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA)
        assert list(value) == SCHEMA["required"] and text.startswith('{"place": ')
        assert (forced > 0) == (forces and seed % 5 > 0)
        pattern = r"[a-c]{2,5}-([0-9]{2}|é)"
        assert re.fullmatch(pattern, drawn(grammars.matcher(Grammar("regex", pattern), ALL, forces=forces), seed, 4)[0])
        choice = ["yes", "no", "not at all", 'a "b"\n', "日本"]
        grammar = Grammar("choice", json.dumps(choice))
        assert drawn(grammars.matcher(grammar, ALL, forces=forces), seed, 4)[0] in choice


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, sentencepiece_model])
def test_tokenizers_of_every_kind_spell_to_the_byte(tmp_path, kind):
    tokenizer = load_tokenizer(kind(tmp_path / "model"))
    size = tokenizer.backend.num_ids
    every = np.full(-(-size // 32), 0xFFFFFFFF, np.uint32)
    matcher = Grammars(tokenizer, size).matcher(of_schema(SCHEMA), every, forces=True)
    text, forced = drawn(matcher, 1, 16, tokenizer)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text.startswith('{"place": ') and forced > 4


def test_forced_tokens_are_those_of_the_tokenizer(grammars):
    text = '{"place": "'
    forced, bits = grammars.matcher(of_schema(SCHEMA), ALL, forces=True).ahead(16)
    assert forced == tokenizer().backend.encode(text, special=False)[: len(forced)] and len(forced) > 4
    assert all(re.match(r'[ "nsa]', tokenizer().decode([token])) for token in tokens(bits))


def test_a_mask_holds_the_tokens_that_may_begin_the_text(grammars):
    """For three digits those are all tokens of at most three digits; then the end alone."""
    digits = {id: tokenizer().decode([id]) for id in range(SIZE)}
    matcher = grammars.matcher(Grammar("regex", "[0-9]{3}"), ALL, forces=False)
    for left in (3, 2, 1):
        may = tokens(matcher.ahead(4)[1])
        assert may == [id for id, text in digits.items() if re.fullmatch(rf"[0-9]{{1,{left}}}", text)]
        matcher.take(next(id for id in may if len(digits[id]) == 1))
    assert matcher.complete
    either = grammars.matcher(Grammar("regex", "7?"), ALL, forces=False)
    assert tokens(either.ahead(4)[1]) == sorted({*tokenizer().eos_ids, *(i for i in digits if digits[i] == "7")})
    either.take(tokenizer().eos_ids[0])
    assert either.complete


def test_a_request_may_allow_less(grammars):
    [seven] = [id for id in range(SIZE) if tokenizer().decode([id]) == "7"]
    only = np.zeros_like(ALL)
    only[seven // 32] = 1 << seven % 32
    matcher = grammars.matcher(Grammar("regex", "[0-9]{3}"), only, forces=False)
    assert tokens(matcher.ahead(4)[1]) == [seven]
    with pytest.raises(UsageError, match="together allow no next token"):
        grammars.matcher(Grammar("regex", "[a-c]"), only, forces=False).ahead(4)


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (of_schema({"type": "strin"}), "The json_schema cannot be followed (Invalid type: strin)"),
        (of_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (of_schema({"$ref": "#"}), "no text follows it"),
        (of_schema({"items": {"multipleOf": 99.991}}), "multipleOf of 99991 together"),
        (of_schema({"allOf": [{"multipleOf": 101}, {"multipleOf": 0.0103}]}), "multipleOf of 10403 together"),
        (Grammar("json_schema", '{"a":' * 500 + "1" + "}" * 500), "recursion limit exceeded"),
        (Grammar("regex", "(("), "The regex cannot be followed (unclosed group); correct or simplify it."),
        (Grammar("regex", "(?=x)a"), "look-ahead and look-behind, is not supported"),
        (Grammar("regex", "[a&&b]"), "no text follows it"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_a_sentence(grammars, grammar, sentence):
    with pytest.raises(UsageError) as refusal:
        grammars.matcher(grammar, ALL, forces=True)
    said = str(refusal.value)
    assert sentence in said and said.endswith(".") and "\n" not in said and len(said) < 300


def test_a_tokenizer_that_cannot_end_a_text_or_gives_no_bytes_is_refused(grammars):
    yes = Grammar("choice", '["yes"]')
    plain = Library(models.WordLevel({"yes": 0, "<end>": 1}, unk_token="yes"))
    for ends, sentence in ((None, "name it in eos_token_ids"), ((1,), "does not support grammars")):
        with pytest.raises(UsageError, match=sentence):
            Grammars(as_tokenizer(plain, None, ends), 2).matcher(yes, ALL[:1], forces=True)
