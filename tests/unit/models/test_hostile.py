"""Model folders as strangers make them: whatever is wrong with a file, loading ends in one sentence."""

import json
import os
import shutil
import struct
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from places import GOLDEN
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from et_jax.errors import UsageError
from et_jax.models.families.registry import from_hugging_face
from et_jax.serve import engine

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with nothing wrong: a small model, a tokenizer of its size, and settings for both."""
    folder = tmp_path_factory.mktemp("sound") / "model"
    shutil.copytree(GOLDEN / "llama2", folder)
    (folder / "golden.npz").unlink()
    size = load_file(folder / "model.safetensors")[EMBEDDING].shape[0]
    vocabulary = {f"w{id}": id for id in range(size - 2)} | {"<s>": size - 2, "</s>": size - 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "model"))


def opened(folder):
    return engine.load(str(folder), max_num_seqs=2, compilation_cache=None)


def sets(file, **values):
    """An edit that sets fields of one of the JSON files, which may be absent."""

    def edit(folder):
        held = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(held | values))

    return edit


config, settings = partial(sets, "config.json"), partial(sets, "tokenizer_config.json")
in_tokenizer = partial(sets, "tokenizer.json")


def instead(file, make):
    """An edit that makes something in a file's place."""

    def edit(folder):
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return edit


def text(file, content):
    return instead(file, lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode()))


def large(file, size):
    return instead(file, lambda path: (path.touch(), os.truncate(path, size)))


def index(weight_map):
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def header(content, length=None):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return text("model.safetensors", struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(64))


def held_twice(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "one.safetensors")
    save_file({EMBEDDING: -tensors[EMBEDDING]}, folder / "two.safetensors")
    index({"a": "one.safetensors", "b": "two.safetensors"})(folder)


def pattern(regex):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return in_tokenizer(pre_tokenizer=split)


def words(**ids):
    return in_tokenizer(model={"type": "WordLevel", "vocab": ids, "unk_token": "w0"}, added_tokens=[])


FIELDS = {
    "num_attention_heads": ["4", -4, True],
    "hidden_size": [None, "big", 10**12],
    "head_dim": [-8, 0, "8", 7],
    "rope_theta": ["high", -1.0, 0, [1e4]],
    "num_hidden_layers": ["2", 0, 10**6, 10**9],
}
"""Values that a field of a Llama's config.json may not have."""
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
CONFIGS = [
    ("Llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("Llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("Llama", {"quantization_config": {"bits": 4}}, "quantised by 'no known method' are not supported"),
    ("Phi3", {"rope_parameters": LONG | {"long_factor": [1.0]}}, "needs 4 of short_factor"),
    ("Phi3", {"rope_parameters": LONG}, "needs original_max_position_embeddings"),
    ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers are 1 and the layers 2"),
    ("GPT2LMHead", {"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
    ("none", {"architectures": None, "model_type": None}, "architecture 'none given' is not supported; use one of "),
    ("Qwen3Next", {}, "architecture Qwen3NextForCausalLM has layers of linear attention"),
    ("Gemma4", {}, "has layers that share one cache, where here each layer has a cache of its own; use one of "),
    ("DeepseekV3", {}, "compresses keys and values into a latent"),
    (
        "none",
        {"architectures": ["LlavaForConditionalGeneration"]},
        "ForConditionalGeneration is of more than text",
    ),
    ("Gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
    ("Llama", {"rope_parameters": {"type": "linear", "factor": "2"}}, "factor is '2'"),
    ("Llama", {"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ("Llama", {"rope_parameters": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0}}, "beta_fast"),
]
for field, values in FIELDS.items():
    for value in values:
        plain = "missing" if value is None else "" if isinstance(value, list | dict) else repr(value)
        CONFIGS.append(("Llama", {field: value}, f"{field} is {plain}" if plain else field))


@pytest.mark.parametrize(("family", "values", "words"), CONFIGS, ids=[f"{name}-{v}"[:60] for name, v, _ in CONFIGS])
def test_a_config_that_cannot_be_is_refused_in_one_sentence(family, values, words):
    sound = json.loads((GOLDEN / "llama2/config.json").read_text()) | {"architectures": [f"{family}ForCausalLM"]}
    with pytest.raises(UsageError) as refusal:
        from_hugging_face(sound | values, "some/config.json")
    assert words in str(refusal.value) and "some/config.json" in str(refusal.value)
    assert_one_sentence(refusal)


def assert_one_sentence(refusal):
    said = str(refusal.value)
    assert "\n" not in said and len(said) < 600 and said.endswith(".")


PIPES = ["config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "calibration.json"]
PIPES += ["model.safetensors", "model.safetensors.index.json"]
LARGE = {"config.json": 2**30, "chat_template.jinja": 2**30, "tokenizer.json": 2**34}
DAMAGED = {
    "a header of 2^60 bytes": header({}, 2**60),
    "a header that is no JSON": header(b"\xff\xfe{}"),
    "tensors that overlap": header({key: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for key in "ab"}),
    "a strange dtype": header({EMBEDDING: {"dtype": "F7", "shape": [4, 4], "data_offsets": [0, 64]}}),
}
NAMES = [1, None, ["a"], "a" * 5000, "", ".", "a\0b"]
SLOW_EXPRESSIONS = ["(a+)+$", "([^a-z]|[0-9 ])+(?=~~)", r"(\s|\s)+x", "[a-z]*X"]
CASES = {
    "the vocabulary is another": (config(vocab_size=200_000), "by config.json"),
    # any JSON file
    "the config has a field twice": (
        text("config.json", '{"hidden_size": 8, "hidden_size": 8}'),
        "'hidden_size' twice",
    ),
    "the config has an infinity": (text("config.json", '{"a": Infinity}'), "Infinity"),
    **{f"{file} is a pipe": (instead(file, os.mkfifo), f"{file} is not a regular file") for file in PIPES},
    **{
        f"{file} is a folder": (instead(file, Path.mkdir), f"{file} is not a regular file")
        for file in ("config.json", *PIPES[-2:])
    },
    **{f"{file} is large": (large(file, size), f"{file} has {size} bytes") for file, size in LARGE.items()},
    # weights
    "the weights are empty": (text("model.safetensors", ""), "model.safetensors is truncated"),
    **{name: (edit, "truncated or damaged") for name, edit in DAMAGED.items()},
    "the weights are cut short": (lambda f: os.truncate(f / "model.safetensors", 100), "truncated"),
    "there are no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "there is only a pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "only pytorch_mod"),
    # the index
    **{f"the index names {name!r:.9}": (index({EMBEDDING: name}), "weight_map") for name in NAMES},
    "the index names what is not there": (index({EMBEDDING: "b.safetensors"}), "names b.safetensors, which is not in"),
    "the index leaves the folder": (index({EMBEDDING: "../model/model.safetensors"}), "leaves the folder"),
    "the index names a pipe": (lambda f: (index({EMBEDDING: "p"})(f), os.mkfifo(f / "p")), "p is not a regular file"),
    "a tensor is held twice": (held_twice, f"{EMBEDDING} stands in"),
    # the tokenizer
    "bos_token is an object": (settings(bos_token={}), "bos_token"),
    "bos_token is a number": (settings(bos_token=1), "bos_token is 1"),
    "bos_token is a list": (settings(bos_token={"content": ["<s>"]}), "bos_token"),
    "eos_token is a list": (settings(eos_token=["</s>"]), "eos_token"),
    "an id is no number": (settings(added_tokens_decoder={"x": {"content": "a"}}), "added_tokens_decoder"),
    "the added tokens are a list": (settings(added_tokens_decoder=[1]), "added_tokens_decoder"),
    "an added token is null": (settings(added_tokens_decoder={"1": None}), "added_tokens_decoder"),
    "end ids are a hundred": (sets("generation_config.json", eos_token_id=list(range(100))), "end tokens"),
    "the tokenizer is cut short": (text("tokenizer.json", "{"), "tokenizer.json is not a readable"),
    "the tokenizer is no UTF-8": (text("tokenizer.json", b'{"a": "\xff"}'), "tokenizer.json is not a readable"),
    "an enormous id": (words(w0=0, w1=2**31), "tokenizer.json is not a readable"),
    **{f"the tokenizer backtracks on {regex}": (pattern(regex), "tokenizer.json") for regex in SLOW_EXPRESSIONS},
    "the tokenizer knows more than the model": (
        words(**{f"w{id}": id for id in range(100_000)}),
        "tokenizer.json has 100000 tokens",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "neither tokenizer.json nor tokenizer.model"),
    "a tokenizer in GGUF": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model").write_bytes(b"GGUF\3\0\0\0"),
        "GGUF",
    ),
    # the folder
    "the folder is empty": (lambda f: [file.unlink() for file in f.iterdir()], "has no config.json"),
    "orbax is empty": (lambda f: (f / "orbax").mkdir(), "orbax has no checksums.json"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_in_one_sentence(folder, name):
    edit, words = CASES[name]
    edit(folder)
    with pytest.raises(UsageError) as refusal:
        opened(folder)
    assert words in str(refusal.value)
    assert_one_sentence(refusal)


def test_a_file_that_may_not_be_read_is_named(folder):
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    (folder / "config.json").chmod(0)
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        opened(folder)


def test_a_sound_folder_opens_whatever_else_is_said_in_it(folder):
    config(auto_map={"x": 1}, pretraining_tp=1, use_cache=True, something=[None], rope_scaling=None)(folder)
    settings(image_token={}, audio_token=[1], video_token={"content": 7}, emoji="\U0001f408", **{"a\nb": 1})(folder)
    settings(model_max_length=10**30, clean_up_tokenization_spaces=False, added_tokens_decoder={})(folder)
    (folder / "orbax").write_text("a")
    assert opened(folder).tokenizer.encode("w1 w2") == [1, 2]
