"""Leaves that are not a tensor each: fused, divided and stacked layouts of made-up families, both ways and refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_checkpoint import assert_same_bits, random_params

from et_jax.errors import UsageError
from et_jax.models import checkpoint, stored
from et_jax.models.checkpoint import load, restore_converted, save_converted, write_hugging_face
from et_jax.models.families import llama
from et_jax.models.families.registry import FAMILIES
from et_jax.models.sources import Piece, Source, check_sources, tensor_shapes, tensors_of
from scripts.measuring.shapes import SMALL

CONFIG = dataclasses.replace(SMALL, architecture="made_up", vocab_size=24, hidden_size=16, intermediate_size=20)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def fused(shapes):
    """Queries, keys and values in one tensor, and gate and up in another."""
    found = dict(llama.FAMILY.sources(shapes))
    for layer in range(CONFIG.num_layers):
        for name, leaves in (("self_attn.qkv_proj", "q k v"), ("mlp.gate_up_proj", "gate up")):
            members = [f"layers.{layer}.{leaf}" for leaf in leaves.split()]
            ends = np.cumsum([0, *(shapes[leaf][0] for leaf in members)]).tolist()
            whole = ends[-1], shapes[members[0]][1]
            for leaf, begin, end in zip(members, ends, ends[1:], strict=False):
                piece = Piece(tensor=f"model.layers.{layer}.{name}.weight", shape=whole, rows=(begin, end))
                found[leaf] = Source(pieces=(piece,))
    return found


def divided(shapes):
    """The embedding in two tensors, of 7 rows and of the rest; every row of the last layer's keys by itself."""
    found, (rows, width) = dict(llama.FAMILY.sources(shapes)), shapes["embedding"]
    parts = (Piece(tensor="embed.a", shape=(7, width)), Piece(tensor="embed.b", shape=(rows - 7, width)))
    keys = shapes["layers.1.k"]
    stack = tuple(Piece(tensor=f"keys.{i}", shape=(keys[1],)) for i in range(keys[0]))
    return found | {"embedding": Source(pieces=parts), "layers.1.k": Source(pieces=stack, stacked=True)}


def woven(shapes):
    """Gate and up by turns in one tensor, [in, out], of which the last rows are read by themselves."""
    found = dict(llama.FAMILY.sources(shapes))
    for layer in range(CONFIG.num_layers):
        outputs, inputs = shapes[f"layers.{layer}.gate"]
        for lane, name in enumerate(("gate", "up")):
            piece = Piece(
                tensor=f"model.layers.{layer}.woven", shape=(inputs, 2 * outputs), lane=(lane, 2), swapped=True
            )
            found[f"layers.{layer}.{name}"] = Source(pieces=(piece,))
    return found


@pytest.fixture(params=[fused, divided, woven])
def layout(request, monkeypatch):
    family = dataclasses.replace(llama.FAMILY, name="made_up", class_name="MadeUp", sources=request.param)
    monkeypatch.setitem(FAMILIES, "made_up", family)
    return request.param


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, TIED])
@pytest.mark.parametrize(("write", "read"), [(write_hugging_face, load), (save_converted, restore_converted)])
def test_a_layout_returns_every_bit(tmp_path, layout, config, dtype, write, read):
    params = random_params(config, dtype)
    write(tmp_path, config, params)
    assert_same_bits(read(tmp_path)[1], params)


@pytest.mark.parametrize("write", [write_hugging_face, save_converted])
def test_a_dtype_asked_for_is_one_cast_of_the_files(tmp_path, layout, write):
    params = random_params(CONFIG)
    write(tmp_path, CONFIG, params)
    assert_same_bits(load(tmp_path, "bfloat16")[1], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


def test_tensors_hold_the_rows_that_the_layouts_say(tmp_path, monkeypatch):
    params = random_params(CONFIG)
    held = {}
    for how in (fused, divided, woven):
        family = dataclasses.replace(llama.FAMILY, name="made_up", class_name="MadeUp", sources=how)
        monkeypatch.setitem(FAMILIES, "made_up", family)
        write_hugging_face(tmp_path / how.__name__, CONFIG, params)
        held[how] = load_file(tmp_path / how.__name__ / "model.safetensors")
    one, second = params.layers
    qkv = np.concatenate([one.q.array, one.k.array, one.v.array])
    np.testing.assert_array_equal(held[fused]["model.layers.0.self_attn.qkv_proj.weight"], qkv)
    gate_up = np.concatenate([second.gate.array, second.up.array])
    np.testing.assert_array_equal(held[fused]["model.layers.1.mlp.gate_up_proj.weight"], gate_up)
    assert not [name for name in held[fused] if re.search(r"\.(q|k|v|gate|up)_proj", name)]
    np.testing.assert_array_equal(held[divided]["embed.b"], params.embedding.array[7:])
    np.testing.assert_array_equal(held[divided]["keys.3"], second.k.array[3])
    np.testing.assert_array_equal(held[woven]["model.layers.1.woven"][:, ::2], second.gate.array.T)
    np.testing.assert_array_equal(held[woven]["model.layers.1.woven"][:, 1::2], second.up.array.T)


@pytest.mark.parametrize(
    ("layout", "name"), [(fused, "model.layers.1.self_attn.qkv_proj.weight"), (divided, "keys.3")], indirect=["layout"]
)
@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_layout_is_refused_in_one_sentence(tmp_path, layout, name, lost):
    write_hugging_face(tmp_path, CONFIG, random_params(CONFIG))
    file = tmp_path / "model.safetensors"
    tensors = {key: array.copy() for key, array in load_file(file).items()}
    tensors |= {} if lost else {name: np.zeros((3, 16), np.float32)}
    if lost:
        del tensors[name]
    save_file(tensors, file)
    words = f"lack the tensor {name}" if lost else rf"{name} has shape \[3, 16\] but "
    with pytest.raises(UsageError, match=words):
        load(tmp_path)


def test_of_a_tensor_only_the_rows_of_the_piece_are_read(tmp_path, layout):
    write_hugging_face(tmp_path, CONFIG, random_params(CONFIG))
    held = stored.headers(tmp_path)
    for source in checkpoint.sources_of(CONFIG).values():
        for piece in source.pieces:
            found = stored.read_piece(held[piece.tensor], piece)
            assert found.shape == piece.shape_read
            lanes = 1 if piece.lane is None else piece.lane[1]  # which lie too close to be read apart
            assert found.base is None or found.base.nbytes == lanes * found.nbytes  # no view of a larger tensor


SHAPES = {"a": (2, 3), "b": (4, 3)}
WHOLE = {name: Source(pieces=(Piece(tensor=name, shape=shape),)) for name, shape in SHAPES.items()}


def of_one(first, second):
    """Both leaves out of one tensor of six rows."""
    return {
        name: Source(pieces=(Piece(tensor="ab", shape=(6, 3), rows=rows),))
        for name, rows in (("a", first), ("b", second))
    }


def by_turns(first, second):
    """Both leaves out of one tensor, two rows of which are for the first: of three numbers in a row every second."""
    return {
        name: Source(pieces=(Piece(tensor="ab", shape=(4, 6), rows=rows, lane=(lane, 2)),))
        for name, rows, lane in (("a", (0, 2), first), ("b", (0, 4), second))
    }


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (WHOLE | {"a": WHOLE["b"]}, r"got \(4, 3\) of a, wanted shape \(2, 3\)"),
        ({"a": WHOLE["a"]}, "got no source of b"),
        (of_one((0, 2), (1, 5)), r"rows \[\(0, 2\), \(1, 5\)\] of ab, wanted each of its 6 once"),
        (of_one((4, 6), (1, 5)), "wanted each of its 6 once"),
        ({"a": of_one((0, 2), (2, 6))["a"], "b": WHOLE["b"]}, "wanted each of its 6 once"),
        (by_turns(0, 0), r"lanes \[\(0, 2\)\] of ab, wanted each of 2 once"),
        (by_turns(0, 1), r"rows \[\(0, 2\)\] of ab, wanted each of its 4 once"),
    ],
)
def test_sources_that_leave_out_or_repeat_a_row_are_refused(sources, words):
    with pytest.raises(ValueError, match=words):
        check_sources(sources, SHAPES)


def test_sources_that_read_each_row_once_are_not():
    check_sources(WHOLE, SHAPES)
    check_sources(of_one((4, 6), (0, 4)), SHAPES)
    assert tensor_shapes(of_one((0, 2), (2, 6))) == {"ab": (6, 3)}
    leaves = {"a": np.ones((2, 3)), "b": np.zeros((4, 3))}
    assert tensors_of(of_one((4, 6), (0, 4)), leaves)["ab"].sum(axis=1).tolist() == [0, 0, 0, 0, 3, 3]
