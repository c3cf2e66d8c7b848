"""Converted llama2.c models: the published story, and the ids of a slower program written from the format alone."""

import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from places import SHARED
from scripts_here import script

from et_jax.models.checkpoint import load
from et_jax.text import load_tokenizer

MODEL, PIECES = SHARED / "models/stories260K/stories260K.bin", SHARED / "models/stories260K/tok512.bin"
STORY = (  # published with the model
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
    "a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the "
    'park." Lily was sad and didn\'t know what to do. She said, "I want to play with your ball, but I can\'t find it."'
)

pytestmark = pytest.mark.skipif(
    not MODEL.exists(), reason=f"{MODEL} is absent; set ET_JAX_SHARED to the folder of shared models"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories260K")
    script("convert_llama2c").convert(MODEL, PIECES, folder)
    return folder


def test_the_greedy_story_is_the_published_one(folder):
    config, params = load(folder)
    assert config.tie_embeddings

    def append(index, tokens):
        winner = dense_logits(config, params, tokens)[0, index].argmax()
        return tokens.at[0, index + 1].set(winner.astype(jnp.int32))

    story = jax.lax.fori_loop(0, 257, append, jnp.ones((1, 258), jnp.int32))
    assert load_tokenizer(folder).decode(story[0].tolist()).startswith(STORY)


def test_an_untied_head_is_read(folder, tmp_path):
    """With the embedding upside down as a head of its own, the logits are those of the model in reverse."""
    content = MODEL.read_bytes()
    dim, *sizes, vocab, length = struct.unpack("<7i", content[:28])
    embedding = np.frombuffer(content, "<f4", vocab * dim, 28).reshape(vocab, dim)
    untied = struct.pack("<7i", dim, *sizes, -vocab, length) + content[28:] + embedding[::-1].tobytes()
    (tmp_path / "untied.bin").write_bytes(untied)
    script("convert_llama2c").convert(tmp_path / "untied.bin", PIECES, tmp_path / "out")
    assert not load(tmp_path / "out")[0].tie_embeddings
    tokens = jnp.arange(1, 40)[None]
    tied, own = (np.asarray(dense_logits(*load(one), tokens)) for one in (folder, tmp_path / "out"))
    np.testing.assert_allclose(own, tied[..., ::-1], atol=1e-5)


def read_pieces():
    content, pieces, offset = PIECES.read_bytes(), [], 4
    while offset < len(content):
        score, length = struct.unpack("<fi", content[offset : offset + 8])
        pieces.append((content[offset + 8 : offset + 8 + length], score))
        offset += 8 + length
    return pieces


def llama2c_encode(text, pieces):
    """Encode as llama2.c does: characters or bytes, then again and again the best-scored union of neighbours."""
    ids = {piece: id for id, (piece, _) in enumerate(pieces)}
    tokens = [ids[b" "]] if text else []
    for character in text:
        raw = character.encode()
        tokens += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
    while True:
        best, at = -1e10, None
        for i in range(len(tokens) - 1):
            id = ids.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if id is not None and pieces[id][1] > best:
                best, at, union = pieces[id][1], i, id
        if at is None:
            return [1, *tokens]
        tokens[at : at + 2] = [union]


def texts():
    words = st.sampled_from(["the", " the", "Once upon", "  ", "...", "é", "▁", "\n\n", "ll", "aaa", '"', "🐈", "日"])
    return st.lists(st.one_of(words, st.text(max_size=8)), max_size=12).map("".join)


@given(text=texts())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_text_is_encoded_as_by_llama2c(folder, text):
    assume(not any(special in text for special in ("<unk>", "<s>", "</s>")))
    tokenizer, pieces = kept_tokenizer(folder)
    assert tokenizer.encode(text) == llama2c_encode(text, pieces)


@functools.cache
def kept_tokenizer(folder):
    return load_tokenizer(folder), read_pieces()


def header(**changes):
    """The model's file with some numbers of its header changed."""
    names = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "length")
    content = MODEL.read_bytes()
    numbers = dict(zip(names, struct.unpack("<7i", content[:28]), strict=True)) | changes
    return struct.pack("<7i", *numbers.values()) + content[28:]


def tokenizer_file(pieces):
    return struct.pack("<i", 7) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in pieces)


def small(size):
    """A model of one layer and so many pieces, all weights zero, and a tokenizer without pieces for bytes."""
    numbers = size * 8 + 2 * 8 + 4 * 64 + 3 * 8 * 8 + 8 + 4 * 8
    model = struct.pack("<7i", 8, 8, 1, 1, 1, size, 4) + bytes(4 * numbers)
    return model, tokenizer_file([(f"p{i}".encode(), 0.0) for i in range(size)])


REFUSED = [  # files of a model and of a tokenizer, None for the published one
    (lambda: small(300), "has no piece for every byte"),
    (lambda: (None, b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"), "a SentencePiece model"),
    (lambda: (None, struct.pack("<ifi", 7, 0.0, -8)), "not a tokenizer in llama2.c's format"),
    (lambda: (None, struct.pack("<ifi", 7, float("nan"), 1) + b"a"), "not a tokenizer in llama2.c's format"),
    (lambda: (None, tokenizer_file(read_pieces()[:-1])), "has 511 different pieces but the model 512 tokens"),
    (lambda: (None, PIECES.read_bytes()[:-15]), "or cut: after 510 pieces"),
    (lambda: (b"GGUF" + bytes(100), None), "a GGUF file"),
    (lambda: (b"24ka" + bytes(252), None), "makes no sense"),  # llama2.c's newer formats
    (lambda: (MODEL.read_bytes()[:1000], None), "its header calls for"),
    (lambda: (header(layers=2**31 - 1), None), "makes no sense"),
    (lambda: (header(dim=2**30, heads=1, kv_heads=1), None), "makes no sense"),
    (lambda: (header(heads=64, kv_heads=64), None), "makes no sense"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("files", "words"), REFUSED)
def test_another_file_is_refused_and_nothing_is_written(tmp_path, monkeypatch, files, words):
    model, tokenizer = files()
    (tmp_path / "model.bin").write_bytes(MODEL.read_bytes() if model is None else model)
    (tmp_path / "tok.bin").write_bytes(PIECES.read_bytes() if tokenizer is None else tokenizer)
    arguments = [str(tmp_path / name) for name in ("model.bin", "tok.bin", "out")]
    monkeypatch.setattr("sys.argv", ["convert_llama2c", *arguments])
    with pytest.raises(SystemExit, match=f"^convert_llama2c: .*{words}"):
        script("convert_llama2c").main()
    assert not (tmp_path / "out").exists()
