"""Checkpoints that are stored quantised: what they stand for, by encoders of this file, and the refusal of others."""

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_checkpoint import CONFIG as SHAPE
from test_checkpoint import random_params

from et_jax.errors import UsageError
from et_jax.models.checkpoint import assemble, check_weights, load, stored_dtype, write_hugging_face
from et_jax.models.encodings import Mxfp4, encoding_of
from et_jax.models.weights import Int8, is_weight, to_int8

CONFIG = dataclasses.replace(SHAPE, intermediate_size=40)
EMBEDDING, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"
FP8 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]
Coded = tuple[Tensors, np.ndarray]
"""The tensors that stand for a matrix, by the last words of their names, and the numbers that it holds."""


def compressed(layout: str, **scheme: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False} | scheme
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def packed(numbers: np.ndarray, bits: int, order: Sequence[int] | slice = slice(None)) -> np.ndarray:
    """Words of 32 bits of the numbers along the last axis, the first of each word's, by `order`, in the lowest bits."""
    fields = numbers.reshape(*numbers.shape[:-1], -1, 32 // bits)[..., order].astype(np.uint64)
    return (fields << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def scaled(dtype: Any, rows: int | None, columns: int | None, scales: Any = np.float32, **others: Any) -> Any:
    """Numbers of 8 bits with a scale for each block of rows and columns, the last ones cut short; None for all."""

    def encode(draw: np.random.Generator, o: int, i: int) -> Coded:
        drawn = draw.integers(-128, 128, (o, i)) if dtype == np.int8 else draw.normal(size=(o, i))
        small, (high, wide) = drawn.astype(dtype), (rows or o, columns or i)
        scale = draw.uniform(0.5, 2, (-(-o // high), -(-i // wide))).astype(scales)
        expected = [[float(small[r, c]) * float(scale[r // high, c // wide]) for c in range(i)] for r in range(o)]
        last = "weight_scale_inv" if columns else "weight_scale"
        kept = scale if rows or columns else scale.reshape(() if others else 1)
        return {"weight": small, last: kept} | others, np.array(expected)

    return encode


def words(draw: np.random.Generator, o: int, i: int) -> Coded:
    """4 bits in groups of 8 inputs, the middle of the range for zero."""
    fields, scale = draw.integers(0, 16, (o, i)), draw.uniform(0.5, 2, (o, i // 8)).astype(np.float32)
    tensors = {"weight_packed": packed(fields, 4), "weight_scale": scale, "weight_shape": np.array([o, i])}
    return tensors, (fields - 8) * np.repeat(scale, 8, axis=1)


def gptq(draw: np.random.Generator, o: int, i: int, bits: int = 4, lower: int = 1) -> Coded:
    """Groups of 8 inputs each, which inputs are in which drawn at random; the zero points stored `lower`."""
    group = draw.permutation(np.arange(i) // 8)
    q, zero = draw.integers(0, 1 << bits, (i, o)), draw.integers(0, 1 << bits, (i // 8, o))
    scale = draw.uniform(0.5, 2, (i // 8, o)).astype(np.float16)
    tensors = {"qweight": packed(q.T, bits).T.copy(), "qzeros": packed((zero - lower) % (1 << bits), bits)}
    tensors |= {"scales": scale, "g_idx": group.astype(np.int32), "bias": np.zeros(o, np.float16)}
    return tensors, ((q - zero[group]) * scale[group].astype(np.float64)).T


def awq(draw: np.random.Generator, o: int, i: int) -> Coded:
    """Groups of 8 inputs; a word holds eight outputs, the even ones first."""
    q, zero = draw.integers(0, 16, (i, o)), draw.integers(0, 16, (i // 8, o))
    scale, order = draw.uniform(0.5, 2, (i // 8, o)).astype(np.float16), [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"qweight": packed(q, 4, order), "qzeros": packed(zero, 4, order), "scales": scale}
    return tensors, ((q - np.repeat(zero, 8, axis=0)) * np.repeat(scale.astype(np.float64), 8, axis=0)).T


KINDS: dict[str, tuple[dict[str, Any], Callable[..., Coded]]] = {
    "int8 by output": (compressed("int-quantized", num_bits=8, strategy="channel"), scaled(np.int8, 1, None)),
    "int8 whole": (compressed("int-quantized", num_bits=8, strategy="tensor"), scaled(np.int8, None, None)),
    "fp8 by output": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        scaled(FP8, 1, None, ml_dtypes.bfloat16),
    ),
    "fp8 whole": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        scaled(FP8, None, None, input_scale=np.array(3, np.float32)),
    ),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [16, 12]}, scaled(FP8, 16, 12)),
    "words": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=8), words),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False}, gptq),
    "gptq_v2, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 8, "checkpoint_format": "gptq_v2"},
        lambda *shape: gptq(*shape, bits=8, lower=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}, awq),
}


def write(folder: Path, kind: str, alter: Callable[[Tensors], Any] = lambda tensors: None) -> dict[str, np.ndarray]:
    """Write a model whose layers' matrices are stored in a kind, and return the numbers of all of its tensors.

    The tensors are altered before they are written.
    """
    settings, encode = KINDS[kind]
    write_hugging_face(folder, CONFIG, random_params(CONFIG, jnp.bfloat16))
    plain, draw = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    stored, numbers = {}, {}
    for name, tensor in plain.items():
        if tensor.ndim == 2 and name not in (EMBEDDING, HEAD):
            parts, numbers[name] = encode(draw, *tensor.shape)
            stored |= {name.removesuffix("weight") + last: part for last, part in parts.items()}
        else:
            stored[name] = numbers[name] = tensor
    stored |= {name: tensor for name, tensor in plain.items() if name.endswith("bias")}
    alter(stored)
    save_file(stored, folder / "model.safetensors")
    tell(folder, settings)
    return {name: np.asarray(array, np.float32) for name, array in numbers.items()}


def tell(folder: Path, settings: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))


def weights_of(params: Any) -> list[Any]:
    return [node for node in jax.tree.leaves(params, is_leaf=is_weight) if is_weight(node)]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_the_numbers_that_they_stand_for_and_in_8_bits_the_nearest(tmp_path, kind):
    expected = assemble(CONFIG, write(tmp_path, kind))
    check_weights(tmp_path, load(tmp_path)[0])
    assert stored_dtype(tmp_path) == load(tmp_path)[1].embedding.dtype == jnp.bfloat16
    for found, wanted in zip(jax.tree.leaves(load(tmp_path, "float32")[1]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    params = load(tmp_path, quantize="int8")[1]
    for found, wanted in zip(weights_of(params), weights_of(expected), strict=True):
        assert isinstance(found, Int8) and found.dtype == jnp.bfloat16
        near = to_int8(wanted.array, jnp.bfloat16)
        stands_for = np.asarray(found.array, np.float64) * np.asarray(found.scale)[:, None]
        np.testing.assert_allclose(stands_for, wanted.array, atol=float(near.scale.max()) * 0.51)
    others = {leaf.dtype for leaf in jax.tree.leaves(params)} - {np.dtype(np.int8), np.dtype(np.float32)}
    assert others == {jnp.dtype(jnp.bfloat16)}
    if kind == "int8 by output":
        down, kept = params.layers[1].down, load_file(tmp_path / "model.safetensors")
        assert isinstance(down, Int8)
        np.testing.assert_array_equal(down.array, kept[DOWN])
        np.testing.assert_array_equal(down.scale, kept[DOWN + "_scale"][:, 0])


def change(last: str, alter: Callable[[np.ndarray], Any]) -> Callable[[Tensors], Any]:
    """Put what `alter` makes of a part of the down projection in its place."""
    name = DOWN.removesuffix("weight") + last
    return lambda tensors: tensors.update({name: alter(tensors.get(name, np.zeros(2, np.int32)))})


def put(at: int, number: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.where(np.arange(len(array)) == at, array.dtype.type(number), array)


@pytest.mark.parametrize(
    ("kind", "alter", "said"),
    [
        ("int8 by output", lambda tensors: tensors.pop(f"{DOWN}_scale"), f"lack the tensor {DOWN}_scale"),
        ("int8 by output", change("weight", lambda x: x.astype(np.uint8)), "is stored as U8; use a I8 model"),
        ("gptq", change("g_idx", put(3, 5)), "g_idx names the group 5 and there are 5"),
        ("gptq", change("bias", put(3, 1)), "down_proj.bias has no place in this qwen2"),
        ("words", {"group_size": 4}, "has shape [16, 2] but [16, 4] by config.json"),
        ("gptq", {"bits": 8}, "has shape [2, 16] but [4, 16] by config.json"),
    ],
)
def test_weights_that_are_damaged_or_of_other_settings_are_refused_in_one_sentence(tmp_path, kind, alter, said):
    write(tmp_path, kind, alter if callable(alter) else lambda tensors: None)
    if not callable(alter):
        settings = copy.deepcopy(KINDS[kind][0])
        groups = settings.get("config_groups")
        (settings if groups is None else groups["group_0"]["weights"]).update(alter)
        tell(tmp_path, settings)
    attempts = [lambda: load(tmp_path), lambda: load(tmp_path, quantize="int8")]
    attempts += [] if "g_idx names" in said else [lambda: check_weights(tmp_path, CONFIG)]
    for attempt in attempts:
        with pytest.raises(UsageError) as refused:
            attempt()
        assert said in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("gptq", "quantization_config is no object"),
        (
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
            "of the format 'mxfp4-pack-quantized', 4 bits of float by group",
        ),
        (compressed("int-quantized", num_bits=8, symmetric=False), "zero points"),
        (KINDS["int8 by output"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "that are sparse too"),
        (
            KINDS["words"][0]
            | {"config_groups": {name: {"weights": {"num_bits": bits}} for name, bits in (("a", 4), ("b", 8))}},
            "of several kinds",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_config_json_alone(settings, said):
    with pytest.raises(UsageError) as refused:
        encoding_of(settings, "some/config.json")
    assert said in str(refused.value) and str(refused.value).startswith("some/config.json: ")
    assert str(refused.value).endswith(".")


def test_matrices_that_do_not_divide_are_refused_and_no_settings_mean_floats():
    assert encoding_of({}, "config.json") is None
    awq_like = encoding_of(KINDS["awq"][0], "config.json")
    assert awq_like is not None
    with pytest.raises(UsageError, match="of 12 outputs and 16 inputs cannot be packed by 8"):
        awq_like.parts((12, 16))
    with pytest.raises(UsageError, match="Experts of 40 inputs cannot be stored in groups of 32 as mxfp4; mend config"):
        Mxfp4().parts((4, 40, 64))
