"""GGUF files: every architecture and type, against the Hugging Face folder or the library that wrote them."""

import dataclasses
import shutil
import struct
from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN

from et_jax.errors import UsageError
from et_jax.io.gguf import read_gguf
from et_jax.io.json_files import read_json
from et_jax.models.checkpoint import load, loaded_dtype, read_config, remarks, write_hugging_face
from et_jax.models.families.registry import from_hugging_face
from et_jax.models.gguf import config_values
from et_jax.models.hub import resolve
from et_jax.models.params import abstract
from et_jax.models.weights import Int8
from scripts.peers.gguf_file import add_tensor, close, write_gguf

pytestmark = pytest.mark.usefixtures("hardly_optimised")

FAMILIES = ["granite", "llama2", "llama3", "llama_linear", "llama_untied", "llama_yarn", "mixtral", "olmo2", "phi3"]
FAMILIES += ["phi4_mini", "qwen3", "smollm3"]
SAID_OTHERWISE = {
    "gemma2": {"query_pre_attn_scalar": 16, "layer_types": None},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
}
"""Of families whose golden model has what a GGUF file cannot say: what it says instead."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_has_its_weights_and_the_logits_of_transformers(family, tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / family)
    (_, params), (config, found) = load(GOLDEN / family, "float32"), load(tmp_path / "model.gguf", "float32")
    jax.tree.map(np.testing.assert_array_equal, found, params)
    golden = np.load(GOLDEN / family / "golden.npz")
    np.testing.assert_allclose(dense_logits(config, found, golden["tokens"]), golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", SAID_OTHERWISE)
def test_a_converted_model_has_the_weights_and_the_configuration_of_its_folder(family, tmp_path):
    config = from_hugging_face(read_json(GOLDEN / family / "config.json") | SAID_OTHERWISE[family])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), abstract(config, np.float32))
    write_hugging_face(tmp_path, config, params)
    write_gguf(tmp_path / "model.gguf", tmp_path)
    found, of_file = load(tmp_path / "model.gguf")
    ulp = 5e-7 if config.norm_offset else 0  # of norms to which the converter adds 1
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=ulp), of_file, params)
    rounded = {"norm_eps": config.norm_eps, "rope_scaling": config.rope_scaling}
    assert found.norm_eps == np.float32(config.norm_eps) and dataclasses.replace(found, **rounded) == config
    assert getattr(found.rope_scaling, "factor", None) == getattr(config.rope_scaling, "factor", None)


KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"]
DECODED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "MXFP4"]


@pytest.mark.parametrize("kind", KINDS + DECODED)
def test_a_tensor_has_the_numbers_that_its_library_decodes(kind, tmp_path):
    """Of any bytes, for types that the library decodes and does not write."""
    rng, quantised = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantised]
    numbers = rng.normal(size=(6, 2, 256)).astype(np.float32)
    stored = rng.integers(0, 120, (6, 2, 256 // block * size), dtype=np.uint8)
    if kind in KINDS:
        stored = gguf.quantize(numbers, quantised).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("other", numbers[:1])
    writer.add_tensor("one", stored, raw_dtype=quantised)
    close(writer)
    place = read_gguf(tmp_path / "one.gguf").tensors["one"]
    expected = gguf.dequantize(stored.reshape(12, -1), quantised).reshape(numbers.shape)
    assert np.isfinite(expected).all() and expected.std() > 0
    np.testing.assert_array_equal(place.numbers().astype(np.float32), expected)
    np.testing.assert_array_equal(place.numbers((2, 5)).astype(np.float32), expected[2:5])


def test_quantised_weights_are_bfloat16_and_those_of_16_bits_are_not_touched(tmp_path):
    for kind, dtype in (("Q8_0", "bfloat16"), ("BF16", "bfloat16"), ("F16", "float32"), ("F32", "float32")):
        file = tmp_path / f"{kind}.gguf"
        write_gguf(file, GOLDEN / "llama3", kind)
        config, params = load(file)
        assert jnp.dtype(loaded_dtype(file, config)) == dtype == params.embedding.dtype
        assert any("float16 weights are converted" in one for one in remarks(file, config)) == (kind == "F16")
        if kind != "Q8_0":
            continue
        assert kind in {place.kind for place in read_gguf(file).tensors.values()}
        stored = read_gguf(file).tensors["blk.0.attn_output.weight"]  # rows of one block keep their 8 bits
        eight = load(file, quantize="int8")[1].layers[0].o
        assert isinstance(eight, Int8)
        found = np.asarray(eight.array, np.float32) * np.asarray(eight.scale)[:, None]
        np.testing.assert_allclose(found, stored.numbers(), rtol=1e-6)


def test_a_split_file_is_one_model_and_a_folder_stands_for_its_file(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen3", parts=3)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2 and resolve(tmp_path) == files[0]
    jax.tree.map(np.testing.assert_array_equal, load(files[0])[1], load(GOLDEN / "qwen3", "float32")[1])
    shutil.copy(files[0], tmp_path / "other.gguf")
    with pytest.raises(UsageError, match="holds 2 GGUF files"):
        resolve(tmp_path)
    (tmp_path / "other.gguf").unlink()
    (apart := tmp_path / "apart").mkdir()
    shutil.copy(files[0], apart)
    with pytest.raises(UsageError, match=f"{files[1].name} is not beside it"):
        read_gguf(apart / files[0].name)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"arch": "mamba"}, "architecture mamba is not supported; use one of llama, "),
        ({"arch": "olmo2", "attention.sliding_window": 8}, "windows of olmo2 are not supported"),
        ({"attention.head_count": [2, 1]}, "layers of different head_count are not supported"),
        ({"attention.value_length": 8}, "keys and values of other lengths"),
        ({"block_count": None}, "num_hidden_layers is missing"),
        ({"block_count": 2**31}, "num_hidden_layers is 2147483648"),
        ({"expert_count": 4}, "not as ffn_gate_exps"),
        ({}, "lacks the tensor blk.0.attn_norm.weight"),
    ],
)
def test_what_is_not_supported_is_named(values, sentence, tmp_path):
    """Of a small llama with other values and tensors than it has."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", values.get("arch", "llama"))
    for key, value in (sizes | {"attention.head_count": 2} | values).items():
        if isinstance(value, list):
            writer.add_array(f"{writer.arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{writer.arch}.{key}", value)
    add_tensor(writer, "token_embd.weight", np.zeros((96, 32), np.float32))
    close(writer)
    with pytest.raises(UsageError, match=sentence):
        load(tmp_path / "model.gguf")


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2")
    assert read_config(tmp_path / "model.gguf").qkv_bias
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "llama.gguf").write_bytes(content.replace(b"qwen2", b"llama"))
    with pytest.raises(UsageError, match=r"attn_k.bias' has no place in this llama model"):
        load(tmp_path / "llama.gguf")


def test_a_damaged_header_ends_in_a_sentence_and_takes_no_memory(tmp_path):
    """Cut short, with other bytes, or with counts that are far too large."""
    write_gguf(tmp_path / "model.gguf", GOLDEN / "llama3")
    header, rng, refused = (tmp_path / "model.gguf").read_bytes(), np.random.default_rng(0), 0
    ends = header.index(b"blk.1.ffn_up")
    for number in range(200):
        damaged = bytearray(header)
        at = int(rng.integers(4, ends))
        if number % 3 == 0:
            del damaged[at:]
        elif number % 3 == 1:
            damaged[at : at + 4] = rng.bytes(4)
        else:
            damaged[at : at + 8] = int(rng.integers(2**40, 2**62)).to_bytes(8, "little")
        (file := tmp_path / f"{number}.gguf").write_bytes(damaged)
        try:
            load(file)
        except UsageError as error:
            refused += 1
            assert str(error).count("\n") == 0 and len(str(error)) < 600
    assert refused > 160


@pytest.mark.parametrize("family", ["phi3", "gemma2", "granite", "mixtral"])
def test_a_value_of_another_kind_ends_in_a_sentence(family, tmp_path):
    """Each value of a file in turn is a text, a list, a negative number, 0, or far too large."""
    write_gguf(tmp_path / "model.gguf", GOLDEN / family)
    found, refused = read_gguf(tmp_path / "model.gguf"), 0
    for key in found.values:
        for value in ("x", [1, "x"], [], -1, 0, 0.5, 2**40, True):
            try:
                from_hugging_face(config_values(dataclasses.replace(found, values=dict(found.values) | {key: value})))
            except UsageError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 5 * 8


def test_tensors_that_overlap_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in ("one", "other"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    close(writer)
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    at = content.index(b"other") + len("other") + 4 + 8 + 4  # beyond its number of axes, its axis and its type
    assert struct.unpack_from("<Q", content, at) == (128,)
    content[at : at + 8] = bytes(8)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UsageError, match="begins within another"):
        read_gguf(tmp_path / "model.gguf")


def test_what_is_no_gguf_file_is_named_and_a_list_of_millions_before_it_is_made(tmp_path):
    """Of bytes, of which Python's list takes eight times the file."""
    millions = struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"n", 9, 0, 2**24) + bytes(2**24)
    for content, sentence in (
        (b"PK" * 20, "is no GGUF file"),
        (b"GGUF", "too short"),
        (b"GGUF" + b"\xff" * 30, "version"),
        (b"GGUF" + millions, "its lists have more than 8388608 items"),
    ):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(UsageError, match=sentence):
            read_gguf(tmp_path / "model.gguf")
