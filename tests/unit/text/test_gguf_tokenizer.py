"""Tokenizers of GGUF files, against the files that they were made from and against llama.cpp."""

import json

import gguf
import pytest
import sentencepiece
from places import GOLDEN

from et_jax.errors import UsageError
from et_jax.text import load_tokenizer
from scripts.peers.gguf_file import close

LINES = [
    "The cat sat on the mat; it's 12345.67 euros, isn't it?",
    "Das Mädchen ißt Äpfel\r\n\r\n\tdef f(x):\n        return x**2  # ok\n\n\n",
    "猫が好き。 🐈‍⬛🐈 naïve café — ﷽ ١٢٣ Ⅷ ½",
    "CamelCase snake_case HTTPServer2 'S 'Re O'REILLY <|im_start|>user",
    " \x00\x07 a\u00a0b\u3000c\u200bd  ",
]


def with_tokens(file, kind, tokens, types=None, scores=None, **values):
    """Write a file that holds a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    lists = (writer.add_token_list, tokens), (writer.add_token_types, types), (writer.add_token_scores, scores)
    for add, held in lists:
        if held is not None:
            add(held)
    for name, value in values.items():
        add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
        prefix = "tokenizer." if name == "chat_template" else "tokenizer.ggml."
        add[type(value)](prefix + name, value)
    close(writer)
    return file


@pytest.mark.parametrize("rule", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_pairs_are_split_and_merged_as_by_llama_cpp(rule, tmp_path):
    """Of a byte-level vocabulary whose merges cross every boundary that a rule may set; the ids are llama.cpp's."""
    golden = json.loads((GOLDEN / "gguf_tokens.json").read_text())
    tokens, merges = golden["tokens"], golden["merges"]
    types = [3, 3] + [1] * (len(tokens) - 2)
    file = with_tokens(tmp_path / "m.gguf", "gpt2", tokens, types, pre=rule, merges=merges, eos_token_id=1)
    tokenizer = load_tokenizer(file)
    assert [tokenizer.encode(line) for line in LINES] == golden["ids"][rule]
    for line in LINES:
        assert tokenizer.decode(tokenizer.encode(line)) == line.replace("<|im_start|>", "")
    assert tokenizer.eos_ids == (1,) and tokenizer.bos_id is None


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_are_those_of_the_library(prefix, tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(" ".join(line.split()).replace("\x00", "") for line in LINES) * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=500, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=["▁▁"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = range(library.vocab_size())
    kinds = {"IsUnknown": 2, "IsControl": 3, "IsByte": 6}
    types = [next((kind for ask, kind in kinds.items() if getattr(library, ask)(id)), 1) for id in ids]
    tokens = [library.id_to_piece(id) for id in ids]
    two_spaces = library.piece_to_id("▁▁")
    types[two_spaces], tokens[two_spaces] = 4, "  "  # as the converter writes what users defined
    assert two_spaces in library.encode("a  b")
    file = with_tokens(
        tmp_path / "m.gguf", "llama", tokens, types,
        [library.get_score(id) for id in ids], add_space_prefix=prefix, bos_token_id=1, eos_token_id=2,
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )  # fmt: skip
    tokenizer = load_tokenizer(file)
    for line in LINES:
        assert tokenizer.encode(line) == [1, *library.encode(line)]
        assert tokenizer.decode(library.encode(line)) == library.decode(library.encode(line))
    assert tokenizer.chat([{"role": "user", "content": "The cat"}])[:1] == [1]
    assert tokenizer.chat([{"role": "user", "content": "The cat"}])[-1:] == [2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "bert"}, "tokenizers of the kind bert are not supported"),
        ({"pre": "kimi-k2"}, "the splitting rule 'kimi-k2' is not supported; use one of default, "),
        ({"tokens": None}, r"tokenizer.ggml.\*: the field tokens is missing"),
        ({"tokens": ["a", "a"]}, "has a token twice"),
        ({"types": [1]}, "has 2 tokens and 1 of their types"),
        ({"kind": "llama"}, "no score for each of its 2 tokens"),
        ({"merges": ["a c"]}, "is not a readable tokenizer"),
        ({"merges": [1, 2]}, r"tokenizer.ggml.\*: the field merges is "),
        ({"eos_token_id": "last"}, "the field eos_token_id is 'last'"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_named(changes, sentence, tmp_path):
    values = {"kind": "gpt2", "tokens": ["a", "b"], "pre": "smollm"} | changes
    with pytest.raises(UsageError, match=sentence):
        load_tokenizer(with_tokens(tmp_path / "m.gguf", **values))
