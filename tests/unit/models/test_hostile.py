"""Model folders as strangers make them: whatever is wrong with a file, loading ends in one sentence."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import tokenizers
from places import GOLDEN
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from et_jax.errors import UsageError
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


def config(**values):
    return sets("config.json", **values)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def phi(**values):
    return config(architectures=["Phi3ForCausalLM"], head_dim=8, **values)


def rope(**values):
    return config(rope_parameters=values)


def settings(**values):
    return sets("tokenizer_config.json", **values)


def text(file, content):
    """An edit that puts text, or bytes, in a file's place."""
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(raw)


def twice(file, key):
    def edit(folder):
        held = (folder / file).read_text().strip()
        (folder / file).write_text(f"{held[:-1]}, {json.dumps(key)}: 1}}")

    return edit


def directory(file):
    def edit(folder):
        (folder / file).unlink(missing_ok=True)
        (folder / file).mkdir()

    return edit


def pipe(file):
    def edit(folder):
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return edit


def large(file, size):
    def edit(folder):
        (folder / file).unlink(missing_ok=True)
        with (folder / file).open("wb") as writer:
            writer.truncate(size)

    return edit


def index(weight_map):
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def header(content, length=None):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return text("model.safetensors", struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(64))


def tensor(**changes):
    return {EMBEDDING: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changes}


def overlapping(folder):
    one = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    header({"a": one, "b": one})(folder)


def held_twice(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "one.safetensors")
    save_file({EMBEDDING: -tensors[EMBEDDING]}, folder / "two.safetensors")
    index({"a": "one.safetensors", "b": "two.safetensors"})(folder)


def outside(folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    index({name: "../outside.safetensors" for name in load_file(folder / "model.safetensors")})(folder)


def outside_by_name(folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    there = str(folder.parent / "outside.safetensors")
    index({name: there for name in load_file(folder / "model.safetensors")})(folder)


def in_tokenizer(**values):
    return sets("tokenizer.json", **values)


def in_vocabulary(**ids):
    def edit(folder):
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        in_tokenizer(model=model | {"vocab": model["vocab"] | ids})(folder)

    return edit


def pretokenizer(value):
    return in_tokenizer(pre_tokenizer=value)


def pattern(regex):
    return pretokenizer({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})


def vocabulary(size):
    def edit(folder):
        names = {f"w{id}": id for id in range(size)}
        tokenizers.Tokenizer(models.WordLevel(names, unk_token="w0")).save(str(folder / "tokenizer.json"))

    return edit


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def only_orbax(folder):
    emptied(folder)
    (folder / "orbax").mkdir()


def gguf(folder):
    emptied(folder)
    (folder / "model.gguf").write_bytes(b"GGUF")


def without_tokenizer(file, content):
    def edit(folder):
        (folder / "tokenizer.json").unlink()
        text(file, content)(folder)

    return edit


DEEP = "[" * 100_000
CASES = {
    # config.json: types and signs
    "heads are text": (config(num_attention_heads="4"), "num_attention_heads is '4'"),
    "heads are negative": (config(num_attention_heads=-4), "num_attention_heads is -4"),
    "heads are a truth": (config(num_attention_heads=True), "num_attention_heads is True"),
    "key heads are negative": (config(num_key_value_heads=-2), "num_key_value_heads is -2"),
    "key heads are a fraction": (config(num_key_value_heads=1.5), "num_key_value_heads is 1.5"),
    "more key heads than heads": (config(num_key_value_heads=64), "cannot share 64"),
    "head_dim is negative": (config(head_dim=-8), "head_dim is -8"),
    "head_dim is zero": (config(head_dim=0), "head_dim is 0"),
    "head_dim is text": (config(head_dim="8"), "head_dim is '8'"),
    "head_dim is odd": (config(head_dim=7), "head_dim is 7"),
    "heads do not divide the width": (config(head_dim=None, num_attention_heads=5, num_key_value_heads=5), "head_dim"),
    "heads outnumber the width": (config(head_dim=None, num_attention_heads=4096), "head_dim"),
    "rope_theta is text": (config(rope_theta="high"), "rope_theta is 'high'"),
    "rope_theta is negative": (config(rope_theta=-1.0), "rope_theta is -1.0"),
    "rope_theta is zero": (config(rope_theta=0), "rope_theta is 0"),
    "rope_theta is a list": (config(rope_theta=[1e4]), "rope_theta"),
    "rope_theta is infinite": (config(rope_theta=1e300), "rope_theta"),
    "eps is text": (config(rms_norm_eps="1e-6"), "rms_norm_eps is '1e-6'"),
    "eps is negative": (config(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06"),
    "eps is null": (config(rms_norm_eps=None), "rms_norm_eps is missing"),
    "eos is text": (config(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "eos is a fraction": (config(eos_token_id=[1.5]), "eos_token_id"),
    "eos is negative": (config(eos_token_id=-1), "eos_token_id is -1"),
    "eos is nested": (config(eos_token_id=[[2]]), "eos_token_id"),
    "eos is enormous": (config(eos_token_id=10**12), "eos_token_id"),
    "bos is text": (config(bos_token_id="<s>"), "bos_token_id is '<s>'"),
    "scaling is a list": (config(rope_scaling=[1]), "rope_scaling"),
    "scaling is text": (config(rope_scaling="linear"), "rope_scaling is 'linear'"),
    "scaling has a textual factor": (rope(type="linear", factor="2"), "factor is '2'"),
    "scaling has no such factor": (rope(type="linear", factor=0), "factor is 0"),
    "scaling has a negative factor": (rope(type="yarn", factor=-4.0), "factor is -4.0"),
    "scaling has a strange kind": (rope(type=["linear"], factor=2.0), "type"),
    "scaling spans nothing": (
        rope(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0),
        "high_freq_factor",
    ),
    "scaling began at nothing": (
        rope(type="yarn", factor=2.0, original_max_position_embeddings=0),
        "original_max_position_embeddings is 0",
    ),
    "scaling has slow above fast": (rope(type="yarn", factor=2.0, beta_fast=1.0, beta_slow=32.0), "beta_fast"),
    "rotary settings by kind of layer": (config(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "rope_param"),
    "rotary share is text": (config(partial_rotary_factor="half"), "partial_rotary_factor is 'half'"),
    "a part of a head is odd": (phi(partial_rotary_factor=0.4), "partial_rotary_factor gives no even part"),
    "a part of a head is nothing": (phi(partial_rotary_factor=0.1), "partial_rotary_factor gives no even part"),
    "a part of a head is more than whole": (phi(partial_rotary_factor=2.0), "partial_rotary_factor gives no even part"),
    "long factors are too few": (phi(rope_parameters=LONG | {"long_factor": [1.0]}), "needs 4 of short_factor"),
    "long factors are text": (phi(rope_parameters=LONG | {"long_factor": ["1"] * 4}), "long_factor"),
    "long factors are nothing": (phi(rope_parameters=LONG | {"short_factor": [0.0] * 4}), "short_factor"),
    "long factors began nowhere": (phi(rope_parameters=LONG), "needs original_max_position_embeddings"),
    "turning layers are too few": (
        config(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1]),
        "no_rope_layers are 1 and the layers 2",
    ),
    "turning layers are text": (config(architectures=["SmolLM3ForCausalLM"], no_rope_layers="1"), "no_rope_layers"),
    "a cap is zero": (config(architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=0), "attn_logit_softcapping"),
    "a scale is negative": (config(architectures=["GraniteForCausalLM"], logits_scaling=-1), "logits_scaling is -1"),
    "attention looks ahead": (config(use_bidirectional_attention=True), "use_bidirectional_attention"),
    "a text model is a list": (config(architectures=["Gemma3ForConditionalGeneration"], text_config=[]), "lack"),
    "architectures are text": (config(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM'"),
    "architectures are numbers": (config(architectures=[7]), "architectures"),
    "architectures are lists": (config(architectures=[["LlamaForCausalLM"]]), "architectures"),
    "architectures are an object": (config(architectures={"a": 1}), "architectures"),
    "model_type is a list": (config(architectures=None, model_type=["llama"]), "model_type"),
    "window is text": (config(sliding_window="8"), "sliding_window is '8'"),
    "window is negative": (config(architectures=["MistralForCausalLM"], sliding_window=-8), "sliding_window is -8"),
    "window is zero": (config(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window is 0"),
    "layer types are too few": (
        config(architectures=["MistralForCausalLM"], sliding_window=8, layer_types=["full_attention"]),
        "layer_types",
    ),
    "layer types are numbers": (config(layer_types=[1, 2]), "layer_types"),
    "layer types are strange": (config(layer_types=["linear_attention"] * 2), "linear_attention"),
    "windows begin at text": (
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, max_window_layers="all"),
        "max_window_layers is 'all'",
    ),
    "the depth is text": (config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "the depth is zero": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "the depth is a million": (config(num_hidden_layers=10**6), "num_hidden_layers is 1000000"),
    "the depth is a thousand million": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "the depth is more than there is": (config(num_hidden_layers=1000), "lack the tensor model.layers"),
    "the vocabulary is enormous": (config(vocab_size=10**9), "vocab_size is 1000000000"),
    "the vocabulary is another": (config(vocab_size=200_000), "by config.json"),
    "the width is enormous": (config(hidden_size=10**12), "hidden_size is 1000000000000"),
    "the length is enormous": (
        config(max_position_embeddings=10**18),
        "max_position_embeddings is 1000000000000000000",
    ),
    "the length is null": (config(max_position_embeddings=None), "max_position_embeddings is missing"),
    "tied is text": (config(tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
    "the dtype is a number": (config(torch_dtype=32), "dtype is 32"),
    "the dtype is a list": (config(dtype=["float32"]), "dtype"),
    "hidden_act is a list": (config(hidden_act=["silu"]), "hidden_act"),
    # any JSON file
    "the config is empty": (text("config.json", ""), "config.json is not readable JSON"),
    "the config is deep": (text("config.json", DEEP), "config.json"),
    "the config is deep within": (text("config.json", '{"a":' * 100_000), "config.json"),
    "the config has a field twice": (twice("config.json", "hidden_size"), "'hidden_size' twice"),
    "the config has an infinity": (text("config.json", '{"a": Infinity}'), "Infinity"),
    "the config has a long number": (text("config.json", '{"a": ' + "9" * 100_000 + "}"), "config.json"),
    "the config is no UTF-8": (text("config.json", b'{"a": "\xff"}'), "config.json is not readable JSON"),
    "the config is UTF-16": (text("config.json", '{"a": 1}'.encode("utf-16")), "config.json is not readable JSON"),
    "the config has half a character": (config(hidden_act="\ud800"), "half of a surrogate pair"),
    "the settings have half a character": (settings(bos_token="\ud800"), "half of a surrogate pair"),
    "the end ids are half a character": (sets("generation_config.json", eos_token_id="\ud800"), "surrogate pair"),
    "the config has a mark": (text("config.json", b"\xef\xbb\xbf{}"), "BOM"),
    "the config is large": (large("config.json", 2**30), "config.json has 1073741824 bytes"),
    "the config is a folder": (directory("config.json"), "config.json is not a regular file"),
    "the config is a pipe": (pipe("config.json"), "config.json is not a regular file"),
    "the settings are a pipe": (pipe("tokenizer_config.json"), "tokenizer_config.json is not a regular file"),
    "the settings are null": (text("tokenizer_config.json", "null"), "not a JSON object"),
    "the calibration is a pipe": (pipe("calibration.json"), "calibration.json"),
    "the calibration is a truth": (sets("calibration.json", temperature=True), "calibration.json"),
    "the calibration is text": (sets("calibration.json", temperature="1.0"), "calibration.json"),
    # weights
    "the weights are a pipe": (pipe("model.safetensors"), "model.safetensors is not a regular file"),
    "the weights are a folder": (directory("model.safetensors"), "model.safetensors is not a regular file"),
    "the weights are empty": (text("model.safetensors", ""), "model.safetensors is truncated"),
    "a header of 2^60 bytes": (header({}, 2**60), "truncated or damaged"),
    "a header of 99 MB": (header({}, 99_000_000), "truncated or damaged"),
    "a header that is no JSON": (header(b"\xff\xfe{}"), "truncated or damaged"),
    "a header that is a list": (header([]), "truncated or damaged"),
    "a header without tensors": (text("model.safetensors", struct.pack("<Q", 2) + b"{}"), "lack the tensor"),
    "a negative shape": (header(tensor(shape=[-4, 4])), "truncated or damaged"),
    "a shape of 2^124": (header(tensor(shape=[2**62, 2**62])), "truncated or damaged"),
    "no data": (header(tensor(shape=[0, 4], data_offsets=[0, 0])), "model.safetensors"),
    "offsets the wrong way": (header(tensor(data_offsets=[64, 0])), "truncated or damaged"),
    "offsets beyond the end": (header(tensor(data_offsets=[0, 10**9])), "truncated or damaged"),
    "tensors that overlap": (overlapping, "truncated or damaged"),
    "a strange dtype": (header(tensor(dtype="F7")), "truncated or damaged"),
    "no weights but GGUF": (gguf, "config.json"),
    # the index
    "the index names numbers": (index({EMBEDDING: 1}), "weight_map"),
    "the index names null": (index({EMBEDDING: None}), "weight_map"),
    "the index names lists": (index({EMBEDDING: ["a"]}), "weight_map"),
    "the index is a list": (index(["model.safetensors"]), "weight_map"),
    "the index is empty": (index({}), "weight_map"),
    "the index has a long name": (index({EMBEDDING: "a" * 5000}), "weight_map"),
    "the index names nothing": (index({EMBEDDING: ""}), "weight_map"),
    "the index names the folder": (index({EMBEDDING: "."}), "weight_map"),
    "the index has a NUL": (index({EMBEDDING: "a\0b"}), "weight_map"),
    "the index has half a character": (index({EMBEDDING: "\ud800"}), "half of a surrogate pair"),
    "the index leaves the folder": (outside, "leaves the folder"),
    "the index leaves the folder by name": (outside_by_name, "leaves the folder"),
    "the index leaves the folder midway": (index({EMBEDDING: "a/../../b.safetensors"}), "leaves the folder"),
    "the index leaves the folder elsewhere": (index({EMBEDDING: "..\\b.safetensors"}), "leaves the folder"),
    "the index is a pipe": (pipe("model.safetensors.index.json"), "not a regular file"),
    "the index names a pipe": (lambda f: (index({EMBEDDING: "p"})(f), os.mkfifo(f / "p")), "p is not a regular file"),
    "a tensor is held twice": (held_twice, f"{EMBEDDING} stands in"),
    # the tokenizer
    "bos is an empty object": (settings(bos_token={}), "bos_token"),
    "bos is a number": (settings(bos_token=1), "bos_token is 1"),
    "bos has a list for content": (settings(bos_token={"content": ["<s>"]}), "bos_token"),
    "eos is a list of names": (settings(eos_token=["</s>"]), "eos_token"),
    "the map holds a list": (sets("special_tokens_map.json", bos_token=["<s>"]), "special_tokens_map.json"),
    "the map is a list": (text("special_tokens_map.json", "[]"), "special_tokens_map.json is not a JSON object"),
    "add_bos is text": (settings(add_bos_token="yes"), "add_bos_token is 'yes'"),
    "added tokens have words for ids": (settings(added_tokens_decoder={"x": {"content": "a"}}), "added_tokens_decoder"),
    "added tokens are a list": (settings(added_tokens_decoder=[1]), "added_tokens_decoder"),
    "added tokens are null": (settings(added_tokens_decoder={"1": None}), "added_tokens_decoder"),
    "a template that is a number": (settings(chat_template=7), "chat_template is 7"),
    "a template that lists numbers": (settings(chat_template=[1]), "chat_template"),
    "a template without a name": (settings(chat_template=[{"template": "a"}]), "chat_template"),
    "a template without text": (settings(chat_template=[{"name": "default", "template": None}]), "chat_template"),
    "a template file that is a pipe": (pipe("chat_template.jinja"), "chat_template.jinja is not a regular file"),
    "a template file that is no UTF-8": (text("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "a template file that is large": (large("chat_template.jinja", 2**30), "chat_template.jinja has 1073741824 bytes"),
    "end ids are text": (sets("generation_config.json", eos_token_id="2"), "eos_token_id is '2'"),
    "end ids are a hundred": (sets("generation_config.json", eos_token_id=list(range(100))), "end tokens"),
    "the tokenizer is a folder": (directory("tokenizer.json"), "tokenizer.json is not a regular file"),
    "the tokenizer is a pipe": (pipe("tokenizer.json"), "tokenizer.json is not a regular file"),
    "the tokenizer is large": (large("tokenizer.json", 2**34), "tokenizer.json has 17179869184 bytes"),
    "the tokenizer is deep": (text("tokenizer.json", '{"decoder":' * 5000), "tokenizer.json is not a readable"),
    "the tokenizer is no UTF-8": (text("tokenizer.json", b'{"a": "\xff"}'), "tokenizer.json is not a readable"),
    "the tokenizer has no such expression": (pattern("(a"), "tokenizer.json is not a readable"),
    "the tokenizer has an enormous id": (in_vocabulary(w1=2**31), "tokenizer.json is not a readable"),
    "the tokenizer has a negative id": (in_vocabulary(w1=-1), "tokenizer.json is not a readable"),
    "the tokenizer adds an enormous id": (
        in_tokenizer(added_tokens=[{"id": 2**32 - 1, "content": "a", "special": True}]),
        "tokenizer.json is not a readable",
    ),
    "the tokenizer backtracks": (pattern("(a+)+$"), "tokenizer.json"),
    "the tokenizer backtracks on others": (pattern("([^a-z]|[0-9 ])+(?=~~)"), "tokenizer.json"),
    "the tokenizer backtracks elsewhere": (
        pattern(r"(\s|\s)+x"),
        "tokenizer.json",
    ),
    "the tokenizer takes a square of the time": (pattern("[a-z]*X"), "tokenizer.json"),
    "the tokenizer knows more than the model": (vocabulary(100_000), "tokenizer.json knows"),
    "the tokenizer knows far less": (vocabulary(5), "tokenizer.json knows"),
    "a tokenizer of ranks": (without_tokenizer("tokenizer.model", b"IQ== 0\nIg== 1\n"), "tiktoken"),
    "a tokenizer in GGUF": (without_tokenizer("tokenizer.model", b"GGUF\3\0\0\0"), "GGUF"),
    "a tokenizer in JSON": (without_tokenizer("tokenizer.model", b'{"version": "1.0"}'), "tokenizer.json"),
    "a tokenizer of noise": (without_tokenizer("tokenizer.model", bytes(range(256)) * 9), "SentencePiece"),
    "a tokenizer of nothing": (without_tokenizer("tokenizer.model", b""), "SentencePiece"),
    # the folder
    "the folder is empty": (emptied, "config.json"),
    "the folder holds orbax alone": (only_orbax, "config.json"),
    "orbax is a file": (lambda f: (f / "orbax").write_text("a"), None),
    "orbax is empty": (lambda f: (f / "orbax").mkdir(), "orbax has no checksums.json"),
}


def test_the_sound_folder_opens(folder):
    assert opened(folder).tokenizer.encode("w1 w2") == [1, 2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_in_one_sentence(folder, name):
    edit, words = CASES[name]
    edit(folder)
    if words is None:
        opened(folder)
        return
    with pytest.raises(UsageError) as refusal:
        opened(folder)
    said = str(refusal.value)
    assert words in said
    assert "\n" not in said and len(said) < 600 and said.endswith(".")


def test_a_file_that_may_not_be_read_is_named(folder):
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    (folder / "config.json").chmod(0)
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        opened(folder)


def test_unknown_fields_are_allowed(folder):
    config(auto_map={"x": 1}, pretraining_tp=1, use_cache=True, something=[None], rope_scaling=None)(folder)
    settings(image_token={}, audio_token=[1], video_token={"content": 7}, emoji="\U0001f408", **{"a\nb": 1})(folder)
    settings(model_max_length=10**30, clean_up_tokenization_spaces=False, added_tokens_decoder={})(folder)
    opened(folder)
