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
from safetensors.numpy import load_file, save_file

from et_jax.errors import UsageError
from et_jax.models import checkpoint, weights
from et_jax.models.checkpoint import load, restore_converted, save_converted, sources_of, write_hugging_face
from et_jax.models.config import ExpertConfig
from et_jax.models.params import abstract, in_stacks, num_weights
from et_jax.models.sources import tensor_shapes
from et_jax.models.transformer import initialise
from scripts.measuring.shapes import SMALL

CONFIG = dataclasses.replace(
    SMALL, architecture="qwen2", vocab_size=24, hidden_size=16, intermediate_size=20, head_dim=4, qkv_bias=True
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
EMBEDDING, HEAD, BIAS = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.bias"


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


def split(folder: Path) -> None:
    """Divide the single file into two shards and an index."""
    tensors = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_a_hugging_face_folder_returns_every_bit(tmp_path, config, dtype):
    params = random_params(config, dtype)
    write_hugging_face(tmp_path, config, params)
    loaded_config, loaded = load(tmp_path)
    assert loaded_config == config
    assert_same_bits(loaded, params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_a_converted_folder_returns_every_bit(tmp_path, config, dtype):
    params = random_params(config, dtype)
    save_converted(tmp_path, config, params)
    for restored_config, restored in (restore_converted(tmp_path), load(tmp_path)):
        assert restored_config == config
        assert_same_bits(restored, params)


def test_whoever_may_read_the_configuration_may_read_the_weights(folder):
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_names_are_those_of_the_format(folder):
    names = set(load_file(folder / "model.safetensors"))
    layer = {f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")} | {
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    expected = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
    assert names == expected | {EMBEDDING, HEAD, "model.norm.weight"}
    assert set(tensor_shapes(sources_of(TIED))) == names - {HEAD}


@pytest.mark.parametrize("config", [CONFIG, TIED, dataclasses.replace(CONFIG, num_layers=7, windows=(None,) * 7)])
def test_weights_are_counted_without_being_described(config):
    assert num_weights(config) == sum(int(np.prod(source.shape)) for source in sources_of(config).values())


@pytest.mark.parametrize("written", [write_hugging_face, save_converted])
def test_a_dtype_asked_for_is_one_cast_of_the_file(tmp_path, written):
    params = random_params()
    written(tmp_path, CONFIG, params)
    assert_same_bits(load(tmp_path, "bfloat16")[1], jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert_same_bits(load(tmp_path, "float32")[1], params)


def test_float16_becomes_float32(folder):
    half = {name: array.astype(np.float16) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors")
    _, params = load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert np.array_equal(params.embedding.array, half[EMBEDDING].astype(np.float32))


def test_shards_hold_what_one_file_held(folder):
    split(folder)
    assert_same_bits(load(folder)[1], random_params())


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_a_tied_model_takes_its_one_matrix_under_either_name(tmp_path, kept):
    params = random_params(TIED)
    write_hugging_face(tmp_path, TIED, params)
    change(tmp_path, lambda tensors: tensors.update({kept: tensors.pop(EMBEDDING)}))
    assert_same_bits(load(tmp_path)[1], params)


def test_a_tied_model_ignores_a_head(tmp_path):
    params = random_params(TIED)
    write_hugging_face(tmp_path, TIED, params)
    change(tmp_path, lambda tensors: tensors.update({HEAD: -tensors[EMBEDDING]}))
    assert_same_bits(load(tmp_path)[1], params)


def test_rotary_tables_are_passed_over(folder):
    inert = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    change(folder, lambda tensors: tensors.update(inert))
    assert_same_bits(load(folder)[1], random_params())


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(size):
    def cut(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return cut


def lose_shard(folder):
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def altered(alter):
    return lambda folder: change(folder, alter)


def write_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (write_config("{"), "config.json is not readable JSON"),
        (write_config("[1]"), "config.json is not a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (only_pickle, "only pytorch_model.bin"),
        (lose_shard, "index.json names model-00002-of-00002.safetensors"),
        (truncate(5), "truncated"),
        (truncate(100), "truncated"),
        (truncate(-1), "truncated"),
        (altered(lambda tensors: tensors.pop(BIAS)), f"lack the tensor {BIAS}"),
        (altered(lambda tensors: tensors.pop(HEAD)), f"lack the tensor {HEAD}"),
        (altered(lambda tensors: tensors.update({BIAS: np.zeros(3, np.float32)})), rf"{BIAS} has shape \[3\]"),
        (altered(lambda tensors: tensors.update({BIAS: np.zeros(16, np.int8)})), f"{BIAS} is stored as I8"),
        (altered(lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(16)})), "no place"),
        (altered(lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": np.zeros(16)})), "no place"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folder, damage, words):
    damage(folder)
    with pytest.raises(UsageError, match=words) as refusal:
        load(folder)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


MIXTURE = dataclasses.replace(
    CONFIG,
    architecture="qwen2_moe",
    experts=ExpertConfig(
        num_experts=3, num_per_token=2, width=12, normalised=False, layers=(False, True), shared_width=8
    ),
)
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize("written", [write_hugging_face, save_converted])
def test_a_mixture_returns_every_bit(tmp_path, written):
    params = random_params(MIXTURE)
    written(tmp_path, MIXTURE, params)
    config, loaded = load(tmp_path)
    assert config == MIXTURE
    assert_same_bits(loaded, params)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"lack the tensor {EXPERT}; fetch the files again"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.copy()}),
            rf"{EXPERT} has shape \[12, 16\] but \[16, 12\]",
        ),
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(np.int8)}), f"{EXPERT} is stored as I8"),
        (
            lambda tensors: tensors.update({EXPERT.replace(".2.", ".3."): tensors[EXPERT]}),
            r"experts.3.down_proj.weight has no place in this qwen2_moe model",
        ),
        (lambda tensors: tensors.pop("model.layers.1.mlp.gate.weight"), "lack the tensor model.layers.1.mlp.gate.weig"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": np.zeros((4, 16), np.float32)}),
            r"gate.weight has shape \[4, 16\] but \[3, 16\]",
        ),
    ],
)
def test_a_damaged_mixture_is_refused_before_a_weight_is_read(tmp_path, monkeypatch, damage, words):
    write_hugging_face(tmp_path, MIXTURE, random_params(MIXTURE))
    change(tmp_path, damage)
    monkeypatch.setattr(checkpoint, "read_piece", None)
    with pytest.raises(UsageError, match=words) as refusal:
        load(tmp_path)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(UsageError, match="int8"):
        load(folder, "int8")


def test_a_folder_without_converted_weights_is_refused(folder):
    with pytest.raises(UsageError, match="holds no converted weights"):
        restore_converted(folder)


def test_converted_weights_of_another_model_are_refused(tmp_path):
    save_converted(tmp_path, CONFIG, random_params())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 25}))
    with pytest.raises(UsageError, match=r"has shape \[24, 16\] but \[25, 16\] by config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("lost", ["_METADATA", "manifest.ocdbt", "d"])
def test_damaged_converted_weights_are_refused(tmp_path, lost):
    save_converted(tmp_path, CONFIG, random_params())
    for file in list((tmp_path / "orbax").rglob(lost)):
        file.rename(file.with_name("lost")) if file.exists() else None
    with pytest.raises(UsageError, match="damaged"):
        load(tmp_path)


def test_converted_weights_with_a_flipped_bit_are_refused(tmp_path, capfd):
    save_converted(tmp_path, CONFIG, random_params())
    largest = max((file for file in (tmp_path / "orbax").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
    held = bytearray(largest.read_bytes())
    held[len(held) // 2] ^= 1
    largest.write_bytes(held)
    with pytest.raises(UsageError, match="has not the bytes it was written with; convert the model again"):
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


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """A float32 model of about 200 MB, none of its tensors over 8 MB."""
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256}
    config = dataclasses.replace(CONFIG, **sizes, num_layers=6, windows=(None,) * 6)
    folder = tmp_path_factory.mktemp("large")
    write_hugging_face(folder, config, initialise(config, jax.random.key(0)))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is Linux's")
@pytest.mark.parametrize(
    ("dtype", "quantize", "layers"),
    [
        ("float32", "", "apart"),
        ("bfloat16", "", "apart"),
        ("bfloat16", "int8", "apart"),
        ("float32", "", "stacked"),
    ],
)
def test_loading_holds_one_tensor_beside_the_model(large_folder, dtype, quantize, layers):
    command = [sys.executable, "-c", MEASURE, str(large_folder), dtype, quantize, layers]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, held, places = (int(figure) for figure in output.split())
    assert held > (5e7 if quantize else 1e8) and places == {"apart": 6, "stacked": 1}[layers]
    # A tensor passes through as mapped pages, a copy and a cast; the rest is room for the allocator, and for the
    # compiler of what puts a layer in its stack.
    room = 6 * LARGEST + (16e6 if layers == "apart" else 96e6)
    assert grown < held + room, f"grew by {grown / 1e6:.0f} MB for a model of {held / 1e6:.0f} MB"


MIXED = dataclasses.replace(
    CONFIG,
    architecture="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    num_layers=5,
    windows=(None,) * 5,
    experts=ExpertConfig(num_experts=4, num_per_token=2, width=8, normalised=True, layers=(False, *(True,) * 4)),
)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("written", [write_hugging_face, pytest.param(save_converted, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [dataclasses.replace(TIED, num_layers=3, windows=(None,) * 3), MIXED])
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


@pytest.mark.parametrize(("written", "stacked"), [(write_hugging_face, False), (save_converted, True)])
def test_the_embedding_alone_is_put_as_it_is_looked_up_in(tmp_path, monkeypatch, written, stacked):
    params = random_params()
    written(tmp_path, CONFIG, params)
    columns = Layout(major_to_minor=(1, 0))
    monkeypatch.setattr(weights, "by_rows", lambda x: Format(columns, x.sharding))
    found: Any = load(tmp_path, stacked=stacked)[1]
    assert order(found.embedding.array) == (1, 0)
    assert order(found.head.array) == (0, 1)
    np.testing.assert_array_equal(found.embedding.array, params.embedding.array)
