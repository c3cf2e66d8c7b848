"""Tokenizers: the conventions of both file formats, chat templates, and text that streams in pieces to its end."""

import functools
import itertools
import json
import shutil

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import ROOT, SHARED
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from et_jax.errors import UsageError
from et_jax.text import Detokenizer, as_tokenizer, load_tokenizer
from et_jax.text.stop_strings import StopStrings

STORIES = SHARED / "models/tinystories-656k"
MISTRAL = SHARED / "tokenizers/mistral-v1-32k/tokenizer.model.v1"
TEXT = "The cat sat on the mat. Das Mädchen ißt Äpfel für 3 €. 猫が好き。 🐈🐈 naïve café\n\n"
CHAT = [{"role": "user", "content": "Hi"}]


def byte_level(folder, special=("<s>", "</s>")):
    """Write a small byte-level BPE whose template puts <s> in front; return the folder."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    return folder


def byte_fallback(folder):
    """Write a small BPE in Llama's manner: a leading space, and byte pieces for what it has no letters for."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["<unk>", "<s>", "</s>", *bytes_, *"▁cat", "at", "▁c", "\ufffd"]
    merges = [("a", "t"), ("▁", "c")]
    vocab = {letter: id for id, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def configure(folder, name="tokenizer_config.json", **values):
    """Change one of the folder's JSON files."""
    file = folder / name
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | values))
    return folder


@pytest.fixture
def folder(tmp_path):
    return byte_level(tmp_path / "model")


def sentencepiece_model(folder):
    """Write the tokenizer of Mistral; return the folder."""
    if not MISTRAL.exists():
        pytest.skip(f"{MISTRAL} is absent; set ET_JAX_SHARED to the folder of shared tokenizers")
    folder.mkdir()
    shutil.copy(MISTRAL, folder / "tokenizer.model")
    return folder


@pytest.fixture
def mistral(tmp_path):
    return sentencepiece_model(tmp_path / "mistral")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Tokenizers of every kind, those of the shared folder where it is here."""
    place = tmp_path_factory.mktemp("tokenizers")
    found = {"byte_level": byte_level(place / "byte_level"), "byte_fallback": byte_fallback(place / "byte_fallback")}
    if SHARED.is_dir():
        found |= {"stories": STORIES, "mistral": sentencepiece_model(place / "mistral")}
    return {name: load_tokenizer(folder) for name, folder in found.items()}


def of(known, name):
    if name not in known:
        pytest.skip(f"{SHARED} is absent; set ET_JAX_SHARED to the folder of shared models and tokenizers")
    return known[name]


@pytest.mark.parametrize(("add_bos", "num_bos"), [(None, 1), (True, 1), (False, 0)])
def test_text_survives_and_begins_as_the_files_say(folder, add_bos, num_bos):
    """Whatever the file says of cutting and padding."""
    if add_bos is not None:
        configure(folder, add_bos_token=add_bos)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=500)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert ids[:num_bos] == [0] * num_bos
    assert ids.count(0) == tokenizer.encode("").count(0) == num_bos and tokenizer.bos_id == 0
    assert tokenizer.decode(ids) == TEXT


def test_end_tokens_are_united_from_all_files_or_those_of_the_model_alone(folder):
    configure(folder, "config.json", eos_token_id=7)
    configure(folder, "generation_config.json", eos_token_id=[8, 7])
    assert load_tokenizer(folder).eos_ids == (1, 7, 8)
    byte_level(folder, ("<s>", "<stop>"))
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eos_ids == (7, 8)


def test_a_tokenizer_may_be_handed_over(folder):
    known = load_tokenizer(folder)
    file, library = folder / "tokenizer.json", tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for handed in (known, folder, str(folder), file, str(file), library):
        found = as_tokenizer(handed, None, None)
        assert found.encode(TEXT) == known.encode(TEXT) and found.decode(found.encode(TEXT)) == TEXT
        named = known.eos_ids if handed in (known, folder, str(folder)) else ()
        assert found.eos_ids == named and found.bos_id == (0 if named else None)
        other = as_tokenizer(handed, 5, (9, 7, 9))
        assert (other.bos_id, other.eos_ids) == (5, (7, 9)) and as_tokenizer(handed, None, ()).eos_ids == ()
    assert known.eos_ids


def test_a_real_model_encodes_as_recorded_and_none_of_its_text_is_held_back(known):
    stories = of(known, "stories")
    for row in json.loads((ROOT / "tests/golden/tinystories-656k.json").read_text()):
        assert stories.encode(row["prompt"]) == row["prompt_ids"]
        stream, shown = Detokenizer(stories), ""
        for index, id in enumerate(row["ids"]):
            shown += stream.push(id)
            assert shown == stories.decode(row["ids"][: index + 1])
        assert shown == row["text"]
        assert (row["ids"][-1] in stories.eos_ids) == row["stopped"]


# Ids of transformers' LlamaTokenizer for the same model, where it agrees with sentencepiece.
@pytest.mark.parametrize(
    ("legacy", "text", "ids"),
    [
        (None, "", [1]),
        (None, "日本語テスト 漢字", [1, 28705, 29142, 29119, 30321, 29610, 29109, 29123, 28705, 233, 191, 165, 29031]),
        (False, "</s>Hi", [1, 2, 23809]),
        (True, "</s>Hi", [1, 2, 15359]),
        (True, "[INST] hi [/INST] yes</s>", [1, 733, 16289, 28793, 12014, 733, 28748, 16289, 28793, 5081, 2]),
    ],
)
def test_sentencepiece_follows_llama_conventions(mistral, legacy, text, ids):
    if legacy is not None:
        configure(mistral, legacy=legacy)
    tokenizer = load_tokenizer(mistral)
    assert tokenizer.encode(text) == ids
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    configure(mistral, add_bos_token=False)
    assert load_tokenizer(mistral).encode(text) == ids[1:]
    configure(mistral, added_tokens_decoder={"32000": {"content": "<|im_start|>"}})
    with pytest.raises(UsageError, match=r"fetch tokenizer\.json too"):
        load_tokenizer(mistral)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            "<s>[system]Be kind[user]Hi[assistant]",
        ),
        ("{{ messages[1] | tojson }}{{ eos_token }}", '{"role": "user", "content": "Hi"}</s>'),
        ("{{ '<é>' | tojson }}{{ strftime_now('%%') }}{{ tools is none }}", '"<é>"%True'),
    ],
)
def test_chat_templates_render(folder, template, expected):
    configure(folder, chat_template=template)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render(CHAT, system_prompt="Be kind") == expected
    assert tokenizer.decode(tokenizer.chat(CHAT, "Be kind")) == expected.replace("<s>", "").replace("</s>", "")


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_chat_begins_once(folder, mistral, add_bos):
    for place in (folder, mistral):
        configure(place, chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token="<s>")
        if add_bos is not None:
            configure(place, add_bos_token=add_bos)
        tokenizer = load_tokenizer(place)
        assert tokenizer.chat(CHAT).count(tokenizer.bos_id) == 1
        assert tokenizer.chat(CHAT)[0] == tokenizer.bos_id


def test_a_template_may_have_a_name_or_a_file_or_be_absent(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for template in (None, named[:1]):
        configure(folder, chat_template=template)
        with pytest.raises(UsageError, match="use --prompt without --chat"):
            load_tokenizer(folder).chat(CHAT)
    configure(folder, chat_template=named)
    assert load_tokenizer(folder).render(CHAT) == "plain"
    (folder / "chat_template.jinja").write_text("from a file")
    assert load_tokenizer(folder).render(CHAT) == "from a file"


@functools.cache
def byte_ids(backend):
    """Ids of single bytes, of which unfinished characters are made."""
    return [id for id in range(600) if backend.visible(id) and "\ufffd" in backend.decode([id])]


@pytest.mark.parametrize(
    ("name", "size"), [("byte_level", 330), ("byte_fallback", 266), ("stories", 2048), ("mistral", 32000)]
)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_streamed_pieces_add_up_to_the_whole_text(known, name, size, data):
    tokenizer = of(known, name)
    parts = st.one_of(
        st.lists(st.integers(0, size + 5), max_size=6),
        st.lists(st.sampled_from(byte_ids(tokenizer.backend) or [0]), max_size=40),
        st.lists(st.sampled_from(tokenizer.encode(TEXT)), max_size=6),
        st.just(tokenizer.encode("🐈日本 ß")),
    )
    ids = [id for part in data.draw(st.lists(parts, max_size=6)) for id in part]
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["text", "bytes", "replacement"])
def test_a_token_costs_the_same_however_long_the_text(known, monkeypatch, kind):
    tokenizer, lengths = known["byte_level"], []
    ids = {
        "text": tokenizer.encode(TEXT) * 20,
        "bytes": byte_ids(tokenizer.backend) * 10,
        "replacement": tokenizer.encode("\ufffd" * 500),
    }[kind]
    decode = tokenizer.backend.decode
    monkeypatch.setattr(tokenizer.backend, "decode", lambda ids: lengths.append(len(ids)) or decode(ids), raising=False)
    stream = Detokenizer(tokenizer)
    for id in ids:
        stream.push(id)
    assert sum(lengths) < 40 * len(ids)
    assert max(lengths) <= 30


def split_by(folder, regex):
    """Cut words as an expression says, ahead of a byte-level alphabet."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {"type": "Sequence", "pretokenizers": [split, alphabet]}
    return load_tokenizer(configure(folder, "tokenizer.json", pre_tokenizer=parts))


def test_what_the_library_gives_up_on_ends_in_one_sentence(folder, mistral, monkeypatch):
    for place, text in itertools.product((folder, mistral), ("\ud800", "a\udfffb")):
        with pytest.raises(UsageError, match="half of a surrogate pair"):
            load_tokenizer(place).encode(text)
    monkeypatch.setattr("et_jax.text.backends.check_expressions", lambda file, unknown: None)
    backtracking = split_by(folder, "(a+)+$")
    lacking = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}, "post_processor": None}
    for tokenizer in (backtracking, load_tokenizer(configure(folder, "tokenizer.json", **lacking))):
        with pytest.raises(UsageError, match="tokenizer cannot read this text"):
            tokenizer.encode("a" * 1000 + "!")


LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def test_published_expressions_are_taken_untried_and_sound_ones_of_ones_own_after_a_trial(folder, monkeypatch):
    """Those of Llama 3 and Qwen 2, as their tokenizer.json spells them."""
    for regex in (r"\d{1,2}| ?\w+|[^\w\s]+|\s+", r"[A-Z]?[a-z]+|.", r"(?=[A-Z])"):
        tokenizer = split_by(folder, regex)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    monkeypatch.setattr("et_jax.text.expressions.Worker", None)
    for digits in (r"\p{N}{1,3}", r"\p{N}"):
        tokenizer = split_by(folder, LETTERS + digits + REST)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


LETTERS_OF_THREE = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


def cut_at_first_stop(text, stops):
    """The definition, by trying every end: the first place where a stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LETTERS_OF_THREE, max_size=8), STOPS)
@example(["one\n", "\ntwo"], ["\n\n"])
@example(["xa long sto", "p"], ["op", "a long stop"])
def test_the_text_is_cut_at_the_first_stop_string_and_only_what_could_become_one_is_held_back(pieces, stops):
    watch = StopStrings(stops)
    shown, rest = [watch.push(piece) for piece in pieces], watch.flush()
    assert ("".join(shown) + rest, watch.found) == cut_at_first_stop("".join(pieces), stops)
    assert not rest or any(stop.startswith(rest) for stop in stops)  # no more is held back
