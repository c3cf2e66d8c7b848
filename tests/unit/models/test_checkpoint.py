"""Checkpoints: bits survive the way to disk and back, mistakes end in one sentence, memory stays small."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from places import GOLDEN
from safetensors.numpy import load_file, save_file

from et_jax.errors import UsageError
from et_jax.models import checkpoint, weights
from et_jax.models.checkpoint import (
    load,
    read_config,
    read_model,
    remarks,
    restore_converted,
    save_converted,
    sources_of,
    write_hugging_face,
)
from et_jax.models.config import ExpertConfig
from et_jax.models.model import put
from et_jax.models.params import abstract, in_stacks
from et_jax.models.stored import headers, read_piece
from et_jax.models.transformer import initialise
from scripts.measuring.shapes import SMALL

CONFIG = dataclasses.replace(
    SMALL, architecture="qwen2", vocab_size=24, hidden_size=16, intermediate_size=20, head_dim=4, qkv_bias=True
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
EXPERTS = ExpertConfig(num_experts=3, num_per_token=2, width=12, normalised=False, layers=(False, True), shared_width=8)
MIXTURE = dataclasses.replace(CONFIG, architecture="qwen2_moe", experts=EXPERTS)
PHI3 = dataclasses.replace(CONFIG, architecture="phi3", qkv_bias=False)
EMBEDDING, HEAD, BIAS = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.bias"
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


def random_params(config=CONFIG, dtype=jnp.float32):
    """Weights that all differ, biases and norms too."""
    leaves, treedef = jax.tree.flatten(initialise(config, jax.random.key(0), dtype))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return treedef.unflatten([jax.random.normal(k, leaf.shape, dtype) for k, leaf in zip(keys, leaves, strict=True)])


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def folder(tmp_path):
    write_hugging_face(tmp_path / "model", CONFIG, random_params())
    return tmp_path / "model"


def change(folder: Path, alter) -> None:
    """Rewrite the folder's tensors after `alter` changed the dict of them."""
    tensors = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
    alter(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("config", "dtype"), [(CONFIG, jnp.float32), (TIED, jnp.bfloat16)])
def test_a_folder_returns_every_bit_and_another_dtype_is_one_cast(tmp_path, config, dtype):
    params, other = random_params(config, dtype), jnp.bfloat16 if dtype == jnp.float32 else jnp.float32
    write_hugging_face(tmp_path / "written", config, params)
    modes = {(tmp_path / "written" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # whoever may read the configuration may read the weights
    save_converted(tmp_path / "converted", config, params)
    for found, loaded in (load(tmp_path / "written"), restore_converted(tmp_path / "converted")):
        assert found == config
        assert_same_bits(loaded, params)
    for folder in ("written", "converted"):
        cast = load(tmp_path / folder, jnp.dtype(other).name)[1]
        assert_same_bits(cast, jax.tree.map(lambda x: x.astype(other), params))


def test_float16_becomes_float32(folder):
    half = {name: array.astype(np.float16) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors")
    config, params = load(folder)
    [said] = remarks(folder, config)
    assert "float16 weights are converted to float32" in said and 'load(dtype="bfloat16")' in said
    assert remarks(folder, config, "bfloat16") == remarks(folder, config, "float32") == []
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert np.array_equal(params.embedding.array, half[EMBEDDING].astype(np.float32))


def test_shards_hold_what_one_file_held(folder):
    tensors, shards = load_file(folder / "model.safetensors"), ("a.safetensors", "b.safetensors")
    weight_map = {name: shards[number % 2] for number, name in enumerate(sorted(tensors))}
    for shard in shards:
        save_file({name: tensors[name].copy() for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert_same_bits(load(folder)[1], random_params())


def test_a_tied_matrix_named_as_the_head_changes_nothing(tmp_path):
    params = random_params(TIED)
    write_hugging_face(tmp_path, TIED, params)
    change(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert_same_bits(load(tmp_path)[1], params)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tied_model_ignores_a_head_that_equals_its_embedding(tmp_path, dtype):
    params = random_params(TIED, jnp.bfloat16)
    write_hugging_face(tmp_path, TIED, params)
    kept = {np.float32: lambda x: x.astype(np.float32), np.float64: np.copy}[dtype]  # of another dtype, or the same
    change(tmp_path, lambda tensors: tensors.update({HEAD: kept(tensors[EMBEDDING])}))
    assert_same_bits(load(tmp_path)[1], params)
    assert remarks(tmp_path, read_model(tmp_path)) == []


@pytest.mark.parametrize("row", [0, 23])
def test_a_head_that_differs_from_the_tied_embedding_is_used_and_reported(tmp_path, row):
    params = random_params(TIED)
    write_hugging_face(tmp_path, TIED, params)

    def alter(tensors):
        tensors[HEAD] = tensors[EMBEDDING].copy()
        tensors[HEAD][row, -1] += 1

    change(tmp_path, alter)
    config, loaded = load(tmp_path)
    assert config == CONFIG == read_model(tmp_path) and read_config(tmp_path) == TIED
    assert_same_bits(loaded.embedding, params.embedding)
    assert loaded.head is not None
    assert np.array_equal(loaded.head.array, load_file(tmp_path / "model.safetensors")[HEAD])
    [said] = remarks(tmp_path, config)
    assert said.endswith(f"but {HEAD} differs from it; {HEAD} is used as the head.")


def moved(body: str, head: str):
    """Alter names of tensors: what stands before those of the body, and before that of the head."""

    def alter(tensors):
        for name in [*tensors]:
            own, stem = ("", head) if name == HEAD else ("model.", body)
            tensors[stem + name.removeprefix(own)] = tensors.pop(name)

    return alter


def with_another(name: str):
    """Alter tensors so that one of this name stands among those of a model within another."""
    return lambda t: (moved("a.", "")(t), t.update({name: np.zeros(16, np.float32)}))


@pytest.mark.parametrize(
    ("config", "alter", "words"),
    [
        (CONFIG, lambda t: t.pop(BIAS), f"lack the tensor {BIAS}"),
        (CONFIG, lambda t: t.pop(HEAD), rf"have no output head \({HEAD}\).* take the files of Qwen2ForCausalLM"),
        (CONFIG, lambda t: t.update({BIAS: np.zeros(3, np.float32)}), rf"{BIAS} has shape \[3\]"),
        (CONFIG, lambda t: t.update({BIAS: t[BIAS].astype(np.int8)}), f"{BIAS} is stored as I8"),
        (CONFIG, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": t["model.norm.weight"]}), "no place"),
        (PHI3, lambda t: t.pop(FUSED), f"lack the tensor {FUSED}"),
        (CONFIG, with_another("b.embed_tokens.weight"), f"lack the tensor {EMBEDDING}"),
        (CONFIG, with_another("model.norm.weight"), "are one tensor"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_before_a_weight_is_read(tmp_path, monkeypatch, config, alter, words):
    write_hugging_face(tmp_path, config, random_params(config))
    change(tmp_path, alter)
    monkeypatch.setattr(checkpoint, "read_piece", None)
    with pytest.raises(UsageError, match=words) as refusal:
        load(tmp_path)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("damaged", ["config.json", "orbax/_METADATA", "orbax/d", "a bit"])
def test_damaged_converted_weights_are_refused(tmp_path, capfd, damaged):
    save_converted(tmp_path, CONFIG, random_params())
    if damaged == "config.json":
        values, words = json.loads((tmp_path / damaged).read_text()), r"has shape \[24, 16\] but \[25, 16\] by config"
        (tmp_path / damaged).write_text(json.dumps(values | {"vocab_size": 25}))
    elif damaged == "a bit":
        files = [file for file in (tmp_path / "orbax").rglob("*") if file.is_file()]
        largest, words = max(files, key=lambda file: file.stat().st_size), "has not the bytes it was written with"
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    else:
        words = "damaged"
        (tmp_path / damaged).rename(tmp_path / "lost")
    with pytest.raises(UsageError, match=words):
        load(tmp_path)
    assert capfd.readouterr() == ("", "")


MEASURE = """
import sys
import jax
from et_jax.models.checkpoint import load

def peak():  # of this program alone: getrusage's figure starts at that of the process it was forked from
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

jax.block_until_ready(jax.numpy.ones(8) + 1)
before = peak()
stacked = sys.argv[4] == "stacked"
_, params = load(sys.argv[1], sys.argv[2], sys.argv[3] or None, stacked=stacked)
leaves = jax.tree.leaves(params)
print(peak() - before, sum(leaf.nbytes for leaf in leaves), len(params.layers))
"""
LARGEST = 4 * 2048 * 1024  # bytes of the largest tensor of the folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is Linux's")
def test_loading_holds_one_tensor_beside_the_model(tmp_path):
    """Of a float32 model of about 200 MB, none of its tensors over 8 MB."""
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256}
    config = dataclasses.replace(CONFIG, **sizes, num_layers=6, windows=(None,) * 6)
    write_hugging_face(tmp_path, config, initialise(config, jax.random.key(0)))
    for dtype, quantize, layers in (("bfloat16", "int8", "apart"), ("float32", "", "stacked")):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype, quantize, layers]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        grown, held, places = (int(figure) for figure in output.split())
        assert held > (5e7 if quantize else 1e8) and places == {"apart": 6, "stacked": 1}[layers]
        # A tensor passes through as mapped pages, a copy and a cast; the rest is room for the allocator, and for the
        # compiler of what puts a layer in its stack.
        room = 6 * LARGEST + (16e6 if layers == "apart" else 96e6)
        assert grown < held + room, f"grew by {grown / 1e6:.0f} MB for a model of {held / 1e6:.0f} MB"


FIVE = dataclasses.replace(EXPERTS, layers=(False, *(True,) * 4))
MIXED = dataclasses.replace(MIXTURE, num_layers=5, windows=(None,) * 5, experts=FIVE)


@pytest.mark.parametrize(
    ("written", "config", "quantize"),
    [
        (write_hugging_face, dataclasses.replace(TIED, num_layers=3, windows=(None,) * 3), None),
        (write_hugging_face, MIXED, "int8"),
        pytest.param(save_converted, MIXED, None, marks=pytest.mark.slow),
        pytest.param(save_converted, MIXED, "int8", marks=pytest.mark.slow),
    ],
)
def test_layers_are_stacked_as_they_are_read(tmp_path, config, written, quantize):
    written(tmp_path, config, random_params(config))
    apart, stacked = (load(tmp_path, quantize=quantize, stacked=stacked)[1] for stacked in (False, True))
    assert len(stacked.layers) == (1 if config.experts is None else 2)
    assert_same_bits(stacked, in_stacks(apart, config, lambda *leaves: jnp.stack(leaves)))
    shapes = abstract(config, jnp.float32, quantize, stacked=True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stacked) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def order(x: Any) -> tuple[int, ...]:
    """Return the axes of an array as they lie, the outermost first."""
    return x.format.layout.major_to_minor


def test_the_embedding_alone_is_put_as_it_is_looked_up_in(tmp_path, monkeypatch):
    params = random_params()
    write_hugging_face(tmp_path / "written", CONFIG, params)
    save_converted(tmp_path / "converted", CONFIG, params)
    columns = Layout(major_to_minor=(1, 0))
    monkeypatch.setattr(weights, "by_rows", lambda x: Format(columns, x.sharding))
    [put_there] = put((params,), jax.devices()[0])
    assert all(leaf.committed for leaf in jax.tree.leaves(put_there))
    found: Any
    for found in (load(tmp_path / "written")[1], load(tmp_path / "converted", stacked=True)[1], put_there):
        assert order(found.embedding.array) == (1, 0)
        assert order(found.head.array) == (0, 1)
        np.testing.assert_array_equal(found.embedding.array, params.embedding.array)


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "mixtral"])
def test_of_a_tensor_only_the_rows_of_the_piece_are_read(family):
    found = headers(GOLDEN / family)
    pieces = [piece for source in sources_of(read_config(GOLDEN / family)).values() for piece in source.pieces]
    assert any(not piece.is_full for piece in pieces) or family == "mixtral"
    for piece in pieces:
        read = read_piece(found[piece.tensor], piece)
        assert read.shape == piece.shape_read
        lanes = 1 if piece.lane is None else piece.lane[1]  # which lie too close to be read apart
        assert read.base is None or read.base.nbytes == lanes * read.nbytes  # no view of a larger tensor


@pytest.mark.parametrize("config", [CONFIG, TIED])
@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("", ""),
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("_orig_mod.model.", "_orig_mod."),
        ("a.model.", "b."),
    ],
)
def test_a_model_from_within_another_or_without_its_first_words_returns_every_bit(tmp_path, config, body, head):
    params = random_params(config)
    write_hugging_face(tmp_path, config, params)
    change(tmp_path, moved(body, head))
    change(tmp_path, lambda tensors: tensors.update({f"{body}layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}))
    loaded_config, loaded = load(tmp_path)
    assert loaded_config == config
    assert_same_bits(loaded, params)
