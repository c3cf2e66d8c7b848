"""LoRA adapters: merged weights give what PEFT computes, and what is not supported ends in one sentence."""

import json
import math
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN
from safetensors.numpy import load_file, save_file

import et_jax
from et_jax.errors import UsageError
from et_jax.models.adapters import beside, bytes_beside, read_adapter
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import Calibration, keep_calibration, read_calibration, write_calibration
from et_jax.models.checkpoint import load, read_model, save_converted
from et_jax.models.fingerprint import fingerprint
from et_jax.models.params import Params
from et_jax.models.weights import Adapted, Int8, num_bytes, to_int8, with_adapters
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading import calibrating
from et_jax.serve.loading.opened import opened
from et_jax.serve.loading.verdict import verdict
from et_jax.serve.requests import GenerationRequest
from scripts.peers.gguf_file import write_gguf

pytestmark = pytest.mark.usefixtures("hardly_optimised")
FAMILIES = sorted(folder.parent.name for folder in GOLDEN.glob("*/lora"))
PREFIX = "base_model.model."


def merged(folder, adapter, **settings):
    return load(folder, "float32", added=read_adapter(adapter, read_model(folder)).added, **settings)


def write_adapter(folder, factors, **settings):
    """Write an adapter of modules, by their names, as PEFT lays it out."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": "all-linear"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = {f"{PREFIX}{module}.lora_{part}.weight": x for module, pair in factors.items() for part, x in pair.items()}
    save_file(names, folder / "adapter_model.safetensors")


def drawn(shape, rank=2):
    rng = np.random.default_rng(rank)
    a, b = rng.normal(0, 0.3, (rank, shape[1])), rng.normal(0, 0.3, (shape[0], rank))
    return {"A": a.astype(np.float32), "B": b.astype(np.float32)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_adapter_gives_the_logits_that_peft_computes_beside_the_weights(family):
    golden, plain = np.load(GOLDEN / family / "lora/golden.npz"), np.load(GOLDEN / family / "golden.npz")
    config, params = merged(GOLDEN / family, GOLDEN / family / "lora")
    assert np.abs(golden["logits"] - plain["logits"]).max() > 1
    np.testing.assert_allclose(dense_logits(config, params, plain["tokens"]), golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "root"), [("mixtral", False), ("mixtral", True), ("phi3", False)])
def test_merged_weights_are_those_merged_in_the_files(family, root, tmp_path):
    folder, tensors = tmp_path / "merged", load_file(GOLDEN / family / "model.safetensors")
    shutil.copytree(GOLDEN / family, folder)
    names = [name for name in tensors if re.search(r"experts\.[02]\.w[13]|mlp\.gate\.|o_proj|qkv", name)]
    assert len(names) > 3
    factors = {name.removesuffix(".weight"): drawn(tensors[name].shape, 2 + i % 2) for i, name in enumerate(names)}
    ranks = {name: len(pair["A"]) for name, pair in factors.items()}
    for name, pair in factors.items():
        scale = 6 / (math.sqrt(ranks[name]) if root else ranks[name])
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + np.float32(scale) * (pair["B"] @ pair["A"])
    save_file(tensors, folder / "model.safetensors")
    write_adapter(tmp_path / "lora", factors, rank_pattern=ranks | {"o_proj": 9}, use_rslora=root)
    tokens = np.load(folder / "golden.npz")["tokens"]
    expected = dense_logits(*load(folder, "float32"), tokens)
    found = dense_logits(*merged(GOLDEN / family, tmp_path / "lora"), tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_a_gguf_file_takes_the_adapter_of_its_folder_and_the_sum_is_rounded(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "llama_untied")
    adapter = GOLDEN / "llama_untied/lora"
    (config, wide), (_, found) = merged(GOLDEN / "llama_untied", adapter), merged(tmp_path / "model.gguf", adapter)
    for name in ("q", "k", "v"):
        for one, other in zip(found.layers, wide.layers, strict=True):
            np.testing.assert_array_equal(getattr(one, name).array, getattr(other, name).array)
    rounded = load(tmp_path / "model.gguf", "bfloat16", added=read_adapter(adapter, config).added)[1].layers[0].q
    np.testing.assert_array_equal(rounded.array, np.asarray(wide.layers[0].q.array).astype(jnp.bfloat16))
    small = merged(GOLDEN / "llama_untied", adapter, quantize="int8")[1].layers[1].q
    expected = to_int8(np.asarray(wide.layers[1].q.array), np.float32)
    assert isinstance(small, Int8)
    np.testing.assert_array_equal(small.array, expected.array)
    save_converted(tmp_path / "converted", config, wide)
    with pytest.raises(UsageError, match="take no adapter"):
        merged(tmp_path / "converted", adapter)


def test_the_fingerprint_of_a_model_changes_with_its_adapter(tmp_path):
    shutil.copytree(GOLDEN / "qwen3/lora", tmp_path / "lora")
    seen = [fingerprint(GOLDEN / "qwen3"), fingerprint(GOLDEN / "qwen3", tmp_path / "lora")]
    weights = tmp_path / "lora/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    seen.append(fingerprint(GOLDEN / "qwen3", tmp_path / "lora"))
    assert len(set(seen)) == 3


Q = "model.layers.0.self_attn.q_proj"
HALF = {"A": np.zeros((2, 32), np.float32)}
KINDS = {
    "peft_type is": ({"peft_type": "IA3"}, "only LORA is supported"),
    "dora": ({"use_dora": True}, "has use_dora True: .* merge it"),
    "other": ({"corda_config": {"x": 1}}, "has corda_config"),
    "bias": ({"bias": "lora_only"}, "with bias none"),
    "saved": ({"modules_to_save": ["lm_head"]}, "without modules_to_save"),
    "conv1d": ({"fan_in_fan_out": True}, "linear layers"),
    "start": ({"init_lora_weights": "pissa"}, "changed weights of the model; save it"),
    "rank": ({"r": 3}, rf"A and B of {Q} have the shapes \[2, 32\] and \[32, 2\], wanted \[3, 32\] and \[32, 3\]"),
    "pattern": ({"rank_pattern": {"self_attn.q_proj": 4}}, r"wanted \[4, 32\]"),
    "sizes": ({"r": 0}, "field r is 0"),
    "many": ({"target_modules": ["q_proj"] * 20_000}, "field target_modules"),
    "target": ({"target_modules": ["q_proj", "c_attn"]}, "targets the module c_attn, which this model has not"),
    "more": (
        {"target_modules": ["q_proj"]},
        "has no matrices of model.layers.1.self_attn.q_proj, unlike target_modules",
    ),
    "other layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "has matrices of model.layers.0"),
    "expression": ({"target_modules": ".*k_proj"}, "has matrices of|has no matrices of"),
    "no expression": ({"target_modules": "(q_proj"}, "is no expression or takes over"),
    "tied": ({}, "ties to its embedding", {"lm_head": HALF}),
    "no such layer": ({}, "which this llama model has not", {"model.layers.7.self_attn.q_proj": HALF}),
    "vision": ({}, "which this llama model has not", {f"vision.{Q}": HALF}),
    "half": ({}, "A or B alone", {Q: HALF}),
    "none": ({}, "holds no matrix", {}),
}
"""Settings, what is said of them, and the matrices of an adapter if they are not those of one module."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_is_not_supported_is_refused_in_one_sentence(kind, tmp_path):
    settings, said, *factors = KINDS[kind]
    write_adapter(tmp_path / "lora", *(factors or [{Q: drawn((32, 32))}]), **settings)
    with pytest.raises(UsageError, match=said) as refused:
        read_adapter(tmp_path / "lora", read_model(GOLDEN / "llama2"))
    assert str(tmp_path / "lora") in str(refused.value)


def test_missing_and_damaged_files_are_named(tmp_path):
    model, folder = read_model(GOLDEN / "llama2"), tmp_path / "lora"
    with pytest.raises(UsageError, match="no folder; name one that holds"):
        read_adapter(folder, model)
    shutil.copytree(GOLDEN / "qwen2/lora", folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UsageError, match="truncated or damaged"):
        read_adapter(folder, model)
    save_file({f"{PREFIX}model.embed_tokens.weight": np.zeros((160, 32), np.float32)}, weights)
    with pytest.raises(UsageError, match="save_embedding_layers=False"):
        read_adapter(folder, model)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"can run code.*safe_serialization=True"):
        read_adapter(folder, model)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
        read_adapter(folder, model)


def test_a_model_loads_with_its_adapter_and_is_measured_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, lora = shutil.copytree(bundled_folder("bundled-small"), tmp_path / "model"), tmp_path / "lora"
    (folder / "calibration.json").unlink(missing_ok=True)
    write_adapter(lora, {Q: drawn((128, 96))})
    plain, config = load(folder)[1].layers[0].q, read_model(folder)
    settings = EngineConfig(name=str(folder), lora=lora, max_model_len=64, compilation_cache=None)
    for made in (
        opened(settings, print).weights[0],
        calibrating.floats(folder, config, "float32", 2**30, settings.adapter),
    ):
        assert isinstance(made, Params)
        off = np.asarray(made.layers[0].q.array, np.float32) - np.asarray(plain.array, np.float32)
        pair = drawn((128, 96))
        np.testing.assert_allclose(off, 3 * (pair["B"] @ pair["A"]), atol=0.02, rtol=0)  # half a step of bfloat16
    write_calibration(folder, Calibration(temperature=2.0), {})
    keep_calibration(folder, Calibration(temperature=3.0), {}, lora)
    found = [read_calibration(folder, config, adapter).temperature for adapter in (None, lora)]
    write_calibration(lora, Calibration(temperature=4.0), {})
    assert [*found, read_calibration(folder, config, lora).temperature] == [2.0, 3.0, 4.0]
    with pytest.raises(UsageError, match="which this llama model has not"):
        verdict(EngineConfig(name="bundled-small", lora=GOLDEN / "gemma3/lora"))


@pytest.mark.parametrize(("family", "stacked"), [("llama_untied", False), ("phi3", False), ("qwen3", True)])
def test_rows_with_adapters_of_their_own_have_the_logits_of_merged_weights(family, stacked, tmp_path):
    folder = GOLDEN / family
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".weight") for name in tensors if re.search(r"layers.*(qkv|v_proj|down_proj)", name)]
    factors = {name: drawn(tensors[f"{name}.weight"].shape, 3) for name in names}
    write_adapter(tmp_path / "other", factors, r=3, target_modules=r".*(qkv_proj|v_proj|down_proj)")
    config, params = load(folder, "float32", stacked=stacked)
    places = {"a": folder / "lora", "b": tmp_path / "other"}
    held = beside(params, config, {name: read_adapter(place, config) for name, place in places.items()})
    added = num_bytes(held) - num_bytes(params)
    assert added == bytes_beside([read_adapter(place, config) for place in places.values()])
    tokens = np.repeat(np.load(folder / "golden.npz")["tokens"][:1], 3, axis=0)
    found = dense_logits(config, with_adapters(held, jnp.array([1, 0, 2])), tokens)
    each = [merged(folder, places["a"])[1], load(folder, "float32")[1], merged(folder, places["b"])[1]]
    for row, weights in zip(found, each, strict=True):
        np.testing.assert_allclose(row, dense_logits(config, weights, tokens[:1])[0], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(dense_logits(config, held, tokens), dense_logits(config, params, tokens))


def test_experts_take_no_adapters_by_name(tmp_path):
    write_adapter(tmp_path / "lora", {"model.layers.0.block_sparse_moe.experts.1.w1": drawn((24, 32))})
    config, params = load(GOLDEN / "mixtral")
    with pytest.raises(UsageError, match=r"The adapter french changes .*experts\.1\.w1.* merge it with lora"):
        beside(params, config, {"french": read_adapter(tmp_path / "lora", config)})


def test_a_request_has_the_adapter_that_it_names(tmp_path):
    for rank in (2, 3):
        write_adapter(tmp_path / f"lora{rank}", {Q: drawn((128, 96), rank)}, r=rank, lora_alpha=rank)
    adapters = {"french": tmp_path / "lora3", "latin": tmp_path / "lora2"}
    with et_jax.load("bundled-small", adapters=adapters, max_model_len=64, compilation_cache=None) as model:
        assert isinstance(model.params, Params)
        beside_q = model.params.layers[0].q
        assert isinstance(beside_q, Adapted)
        for name, rank in (("french", 3), ("latin", 2)):
            [sequence] = model.sequences(0, GenerationRequest(prompt="It was", adapter=name))
            np.testing.assert_array_equal(beside_q.b[sequence.adapter, :, :rank], drawn((128, 96), rank)["B"])
        assert model.sequences(0, GenerationRequest(prompt="It was"))[0].adapter == 0 and not beside_q.b[0].any()
        with pytest.raises(UsageError, match=r'adapter is "greek", which bundled-small .*choose from french, latin'):
            model.sequences(0, GenerationRequest(prompt="It was", adapter="greek"))
