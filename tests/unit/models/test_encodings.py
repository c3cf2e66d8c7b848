"""Checkpoints that are stored quantised: what they stand for, by encoders of this file, and the refusal of others."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from places import GOLDEN
from safetensors.numpy import load_file, save_file
from test_checkpoint import CONFIG as SHAPE
from test_checkpoint import random_params

from et_jax.errors import UsageError
from et_jax.models import stored
from et_jax.models.checkpoint import (
    assemble,
    check_weights,
    load,
    read_config,
    stored_dtype,
    write_hugging_face,
)
from et_jax.models.encodings import Mxfp4, encoding_of
from et_jax.models.weights import Int8, is_weight, to_int8

CONFIG = dataclasses.replace(SHAPE, intermediate_size=40)
EMBEDDING, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, np.ndarray]
Coded = tuple[Tensors, np.ndarray]
"""The tensors that stand for a matrix, by the last words of their names, and the numbers that it holds."""


def compressed(scheme: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | scheme}
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def pack(fields: list[int], bits: int) -> int:
    """A word of these fields, the first in the lowest bits, as a signed number of 32 bits."""
    word = sum(field << (bits * place) for place, field in enumerate(fields))
    return word - (1 << 32) if word >= 1 << 31 else word


def int8_by_output(draw: np.random.Generator, o: int, i: int) -> Coded:
    whole, scale = draw.integers(-128, 128, (o, i)), draw.uniform(0.5, 2, (o, 1)).astype(np.float32)
    return {"weight": whole.astype(np.int8), "weight_scale": scale}, whole * scale


def int8_whole(draw: np.random.Generator, o: int, i: int) -> Coded:
    whole = draw.integers(-128, 128, (o, i))
    return {"weight": whole.astype(np.int8), "weight_scale": np.array([0.25], np.float32)}, whole * 0.25


def small_floats(draw: np.random.Generator, o: int, i: int) -> np.ndarray:
    return draw.normal(size=(o, i)).astype(ml_dtypes.float8_e4m3fn)


def fp8_by_output(draw: np.random.Generator, o: int, i: int) -> Coded:
    small, scale = small_floats(draw, o, i), draw.uniform(0.5, 2, (o, 1)).astype(ml_dtypes.bfloat16)
    return {"weight": small, "weight_scale": scale}, small.astype(np.float64) * scale.astype(np.float64)


def fp8_whole(draw: np.random.Generator, o: int, i: int) -> Coded:
    small = small_floats(draw, o, i)
    tensors = {"weight": small, "weight_scale": np.array(0.5, np.float32), "input_scale": np.array(3.0, np.float32)}
    return tensors, small.astype(np.float64) * 0.5


def fp8_in_blocks(draw: np.random.Generator, o: int, i: int) -> Coded:
    """Blocks of 16 rows and 12 columns, the last ones cut short."""
    small, scale = small_floats(draw, o, i), draw.uniform(0.5, 2, (-(-o // 16), -(-i // 12))).astype(np.float32)
    expected = small.astype(np.float64)
    for row in range(o):
        for column in range(i):
            expected[row, column] *= scale[row // 16, column // 12]
    return {"weight": small, "weight_scale_inv": scale}, expected


def words(draw: np.random.Generator, o: int, i: int) -> Coded:
    """4 bits in groups of 8 inputs, 8 in a word, the middle of the range for zero."""
    fields, scale = draw.integers(0, 16, (o, i)), draw.uniform(0.5, 2, (o, i // 8)).astype(np.float32)
    packed = [[pack(row[at : at + 8].tolist(), 4) for at in range(0, i, 8)] for row in fields]
    shape = np.array([o, i], np.int64)
    tensors = {"weight_packed": np.array(packed, np.int32), "weight_scale": scale, "weight_shape": shape}
    return tensors, (fields - 8) * np.repeat(scale, 8, axis=1)


def gptq(draw: np.random.Generator, o: int, i: int, bits: int = 4, lower: int = 1) -> Coded:
    """Groups of 8 inputs each, which inputs are in which drawn at random; the zero points stored `lower`."""
    most, fields = 1 << bits, 32 // bits
    group = draw.permutation(np.arange(i) // 8)
    q, zero = draw.integers(0, most, (i, o)), draw.integers(1, most, (i // 8, o))
    scale = draw.uniform(0.5, 2, (i // 8, o)).astype(np.float16)
    down = [[pack(q[at : at + fields, column].tolist(), bits) for column in range(o)] for at in range(0, i, fields)]
    along = [[pack((row[at : at + fields] - lower).tolist(), bits) for at in range(0, o, fields)] for row in zero]
    tensors = {
        "qweight": np.array(down, np.int32),
        "qzeros": np.array(along, np.int32),
        "scales": scale,
        "g_idx": group.astype(np.int32),
        "bias": np.zeros(o, np.float16),
    }
    return tensors, ((q - zero[group]) * scale[group].astype(np.float64)).T


def awq(draw: np.random.Generator, o: int, i: int) -> Coded:
    """Groups of 8 inputs; a word holds eight outputs, the even ones first."""
    q, zero = draw.integers(0, 16, (i, o)), draw.integers(0, 16, (i // 8, o))
    scale = draw.uniform(0.5, 2, (i // 8, o)).astype(np.float16)

    def along(rows: np.ndarray) -> np.ndarray:
        eights = [[row[at : at + 8] for at in range(0, o, 8)] for row in rows]
        return np.array(
            [[pack([*eight[::2].tolist(), *eight[1::2].tolist()], 4) for eight in row] for row in eights], np.int32
        )

    group = np.arange(i) // 8
    tensors = {"qweight": along(q), "qzeros": along(zero), "scales": scale}
    return tensors, ((q - zero[group]) * scale[group].astype(np.float64)).T


KINDS: dict[str, tuple[dict[str, Any], Callable[..., Coded]]] = {
    "int8 by output": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        int8_by_output,
    ),
    "int8 whole": (compressed({"num_bits": 8, "type": "int", "strategy": "tensor"}, "int-quantized"), int8_whole),
    "fp8 by output": (
        compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        fp8_by_output,
    ),
    "fp8 whole": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "fp8 in blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 12]},
        fp8_in_blocks,
    ),
    "words": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}, "pack-quantized"),
        words,
    ),
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
def test_weights_that_are_stored_quantised_are_the_numbers_that_they_stand_for(tmp_path, kind):
    numbers = write(tmp_path, kind)
    check_weights(tmp_path, load(tmp_path)[0])
    _, params = load(tmp_path, "float32")
    expected = assemble(CONFIG, numbers)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert stored_dtype(tmp_path) == load(tmp_path)[1].embedding.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_in_8_bits_they_are_what_is_stored_or_the_nearest_to_it(tmp_path, kind):
    numbers = write(tmp_path, kind)
    _, params = load(tmp_path, quantize="int8")
    expected = assemble(CONFIG, numbers)
    for found, wanted in zip(weights_of(params), weights_of(expected), strict=True):
        assert isinstance(found, Int8) and found.dtype == jnp.bfloat16
        near = to_int8(wanted.array, jnp.bfloat16)
        stands_for = np.asarray(found.array, np.float64) * np.asarray(found.scale)[:, None]
        np.testing.assert_allclose(stands_for, wanted.array, atol=float(near.scale.max()) * 0.51)
    down = params.layers[1].down
    assert isinstance(down, Int8)
    if kind == "int8 by output":
        stored = load_file(tmp_path / "model.safetensors")
        assert isinstance(down, Int8)
        np.testing.assert_array_equal(down.array, stored[DOWN])
        np.testing.assert_array_equal(down.scale, stored[DOWN + "_scale"][:, 0])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
        np.dtype(d) for d in (np.int8, np.float32, jnp.bfloat16)
    }


def of_down(last: str) -> str:
    return DOWN.removesuffix("weight") + last


def retype(last: str, dtype: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({of_down(last): tensors[of_down(last)].astype(dtype)})


def without(last: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(of_down(last))


@pytest.mark.parametrize(
    ("kind", "alter", "said"),
    [
        ("int8 by output", without("weight_scale"), "lack the tensor model.layers.1.mlp.down_proj.weight_scale"),
        ("fp8 in blocks", without("weight_scale_inv"), "lack the tensor model.layers.1.mlp.down_proj.weight_scale_inv"),
        ("gptq", without("g_idx"), "lack the tensor model.layers.1.mlp.down_proj.g_idx"),
        ("gptq", without("qweight"), "lack the tensor model.layers.1.mlp.down_proj.weight"),
        ("awq", without("qzeros"), "lack the tensor model.layers.1.mlp.down_proj.qzeros"),
        ("int8 by output", retype("weight", np.uint8), "is stored as U8; use a I8 model"),
        ("words", retype("weight_scale", np.float64), "is stored as F64; use a F32, BF16, F16 model"),
        (
            "gptq",
            lambda tensors: tensors[of_down("g_idx")].__setitem__(3, 5),
            "g_idx names the group 5 and there are 5",
        ),
        (
            "gptq",
            lambda tensors: tensors[of_down("bias")].__setitem__(3, 1),
            "down_proj.bias has no place in this qwen2",
        ),
        (
            "words",
            lambda tensors: tensors.update({of_down("weight_zero_point"): np.zeros(2, np.int32)}),
            "weight_zero_point has no place in this qwen2 model",
        ),
    ],
)
def test_damaged_weights_are_told_in_one_sentence(tmp_path, kind, alter, said):
    write(tmp_path, kind, alter)
    for quantize in (None, "int8"):
        with pytest.raises(UsageError) as refused:
            load(tmp_path, quantize=quantize)
        assert said in str(refused.value) and str(refused.value).endswith(".")
    if "g_idx names" not in said:
        with pytest.raises(UsageError, match=str(refused.value).split(": ")[-1][:40]):
            check_weights(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("words", {"group_size": 4}, "has shape [16, 2] but [16, 4] by config.json"),
        ("awq", {"group_size": 16}, "has shape [2, 2] but [1, 2] by config.json"),
        ("gptq", {"group_size": -1}, "has shape [2, 2] but [1, 2] by config.json"),
        ("fp8 in blocks", {"weight_block_size": [16, 16]}, "has shape [1, 2] but [1, 1] by config.json"),
        ("gptq", {"bits": 8}, "has shape [2, 16] but [4, 16] by config.json"),
    ],
)
def test_another_group_size_than_the_files_have_is_told(tmp_path, kind, change, said):
    write(tmp_path, kind)
    settings = json.loads(json.dumps(KINDS[kind][0]))
    scheme = settings["config_groups"]["group_0"]["weights"] if "config_groups" in settings else settings
    scheme |= change
    tell(tmp_path, settings)
    with pytest.raises(UsageError) as refused:
        check_weights(tmp_path, CONFIG)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("gptq", "quantization_config is no object"),
        ({"bits": 4}, "quantised by 'no known method' are not supported, only by compressed-tensors, fp8"),
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes are not supported"),
        ({"quant_method": "mxfp6"}, "quantised by mxfp6 are not supported, only by compressed-tensors, fp8"),
        ({"quant_method": "nvfp4"}, "quantised by nvfp4 are not supported"),
        (
            compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
            "of the format 'mxfp4-pack-quantized', 4 bits of float by group",
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 8}, "of the format gptq and 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin", "group_size": 8}, "of the format marlin"),
        ({"quant_method": "gptq", "bits": 4}, "in groups of None"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "in groups of None"),
        ({"quant_method": "awq", "bits": 4, "group_size": -5}, "in groups of -5"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"}, "of the version gemv and 4 bits"),
        ({"quant_method": "fp8", "weight_block_size": [4]}, "in blocks of [4]"),
        ({"quant_method": "fp8", "weight_block_size": [4, 0]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "without a scheme"),
        (compressed({"num_bits": 8, "type": "int", "symmetric": False}, "int-quantized"), "zero points"),
        (
            compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, "nvfp4-pack-quantized"),
            "4 bits of float by tensor_group",
        ),
        (
            compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "marlin-24"),
            "8 bits of int by channel",
        ),
        (
            compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized")
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "that are sparse too",
        ),
        (
            KINDS["words"][0]
            | {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
            "of several kinds",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_config_json_alone(tmp_path, settings, said):
    with pytest.raises(UsageError) as refused:
        encoding_of(settings, "some/config.json")
    assert said in str(refused.value) and str(refused.value).startswith("some/config.json: ")
    assert str(refused.value).endswith(".")


def test_a_configuration_without_one_is_of_floats():
    assert encoding_of(None, "config.json") is None and encoding_of({}, "config.json") is None


def test_a_matrix_that_does_not_divide_is_no_packed_one(tmp_path):
    write(tmp_path, "awq")
    encoding = encoding_of(KINDS["awq"][0], "config.json")
    assert encoding is not None
    with pytest.raises(UsageError, match="of 12 outputs and 16 inputs cannot be packed by 8"):
        encoding.parts((12, 16))


PACKED, EXPERTS = GOLDEN / "gpt_oss_mxfp4", "model.layers.1.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"


def four_bits(code: int) -> float:
    """The number of a code of e2m1, by its sign, its exponent less a bias of 1, and its one bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def test_every_byte_of_mxfp4_is_two_numbers_times_a_power_of_two():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 4, 2, 16)  # expert, output, group, byte
    scales = np.array([0, 1, 100, 126, 127, 128, 130, 131, 132, 133, 134, 135, 136, 200, 250, 252], np.uint8)
    found = Mxfp4().decode({"blocks": codes, "scales": scales.reshape(2, 4, 2)})
    assert found.shape == (2, 64, 4) and found.dtype == np.float32
    for byte in range(256):
        expert, output, group, place = np.unravel_index(byte, codes.shape)
        power = 2.0 ** (int(scales[np.ravel_multi_index((expert, output, group), (2, 4, 2))]) - 127)
        for half, code in enumerate((byte & 15, byte >> 4)):
            assert found[expert, 32 * group + 2 * place + half, output] == np.float32(four_bits(code) * power)
    none = Mxfp4().decode({"blocks": codes[:1, :1, :1], "scales": np.full((1, 1, 1), 255, np.uint8)})
    assert np.isnan(none).all()


def test_experts_in_mxfp4_are_the_numbers_they_stand_for_whatever_holds_them():
    stored = load_file(PACKED / "model.safetensors")
    wide = Mxfp4().decode({last: stored[f"{EXPERTS}.gate_up_proj_{last}"] for last in ("blocks", "scales")})
    gate, up = wide[..., 0::2].swapaxes(1, 2), wide[..., 1::2].swapaxes(1, 2)
    for dtype in ("float32", "auto"):  # of 4 bits and a power of two bfloat16 loses nothing
        experts = load(PACKED, dtype)[1].layers[1].experts
        assert experts is not None and experts.gate.dtype == (jnp.float32 if dtype == "float32" else jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(experts.gate.array, np.float32), gate)
        np.testing.assert_array_equal(np.asarray(experts.up.array, np.float32), up)
    experts = load(PACKED, quantize="int8")[1].layers[1].experts
    assert experts is not None and isinstance(experts.up, Int8)
    near = to_int8(up, jnp.bfloat16)
    np.testing.assert_array_equal(experts.up.array, near.array)
    np.testing.assert_array_equal(experts.up.scale, near.scale)
    assert experts.gate_bias is not None and experts.gate_bias.dtype == jnp.bfloat16


def altered_experts(folder: Path, alter: Callable[[Tensors], Any]) -> None:
    shutil.copytree(PACKED, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file({name: tensor.copy() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda tensors: tensors.pop(SCALES), f"lack the tensor {SCALES}; fetch the files again"),
        (lambda tensors: tensors.pop(BLOCKS), f"lack the tensor {EXPERTS}.gate_up_proj; fetch the files again"),
        (
            lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS][:3]}),
            "gate_up_proj_blocks has shape [3, 64, 2, 16] but [4, 64, 2, 16] by config.json",
        ),
        (
            lambda tensors: tensors.update({SCALES: tensors[SCALES][:3]}),
            "gate_up_proj_scales has shape [3, 64, 2] but [4, 64, 2] by config.json",
        ),
        (
            lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS].reshape(4, 64, 4, 8)}),
            "gate_up_proj_blocks has shape [4, 64, 4, 8] but [4, 64, 2, 16] by config.json",
        ),
        (
            lambda tensors: tensors.update({SCALES: np.repeat(tensors[SCALES], 2, axis=2)}),
            "gate_up_proj_scales has shape [4, 64, 4] but [4, 64, 2] by config.json",
        ),
        (
            lambda tensors: tensors.update({SCALES: tensors[SCALES].astype(np.float32)}),
            "gate_up_proj_scales is stored as F32; use a U8 model",
        ),
        (
            lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS].view(np.int8)}),
            "gate_up_proj_blocks is stored as I8; use a U8 model",
        ),
        (
            lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_bias"),
            f"lack the tensor {EXPERTS}.down_proj_bias; fetch the files again",
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.self_attn.sinks"),
            "lack the tensor model.layers.2.self_attn.sinks; fetch the files again",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERTS}.down_proj": np.zeros((4, 32, 64), np.float32)}),
            f"{EXPERTS}.down_proj has no place in this gpt_oss model",
        ),
    ],
)
def test_damaged_experts_in_mxfp4_are_told_in_one_sentence_before_one_is_read(tmp_path, monkeypatch, alter, said):
    altered_experts(tmp_path, alter)
    monkeypatch.setattr(stored, "read_whole", None)
    for attempt in (lambda: load(tmp_path), lambda: check_weights(tmp_path, read_config(tmp_path))):
        with pytest.raises(UsageError) as refused:
            attempt()
        assert said in str(refused.value) and str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_experts_that_are_in_no_groups_of_32_are_refused():
    with pytest.raises(UsageError, match="Experts of 40 inputs cannot be stored in groups of 32 as mxfp4; mend config"):
        Mxfp4().parts((4, 40, 64))
