"""Leaves that are not a tensor each: fused, divided and stacked layouts of made-up families, both ways and refused."""

import dataclasses
from operator import methodcaller

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_checkpoint import assert_same_bits, random_params

from et_jax.errors import UsageError
from et_jax.evidence.shapes import SMALL
from et_jax.models import checkpoint, sources, stored
from et_jax.models.checkpoint import load, save_converted, write_hugging_face
from et_jax.models.families import llama
from et_jax.models.families.registry import FAMILIES
from et_jax.models.sources import Piece, Source, check_sources

CONFIG = dataclasses.replace(SMALL, architecture="made_up", vocab_size=24, hidden_size=16, intermediate_size=20)


def fused(shapes):
    """Queries, keys and values in one tensor, and gate and up in another."""
    joined = {
        "model.layers.*.self_attn.qkv_proj.weight": ("q", "k", "v"),
        "model.layers.*.mlp.gate_up_proj.weight": ("gate", "up"),
    }
    return llama.FAMILY.sources(shapes) | sources.fused(joined)(shapes)


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


def as_family(layout, monkeypatch):
    family = dataclasses.replace(llama.FAMILY, name="made_up", class_name="MadeUp", sources=layout)
    monkeypatch.setitem(FAMILIES, "made_up", family)


@pytest.mark.parametrize("layout", [fused, divided, woven])
def test_a_layout_returns_every_bit_and_is_read_by_its_pieces(tmp_path, monkeypatch, layout):
    as_family(layout, monkeypatch)
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    for config, dtype, other in ((CONFIG, jnp.float32, "bfloat16"), (tied, jnp.bfloat16, "float32")):
        params = random_params(config, dtype)
        write_hugging_face(tmp_path / other / "written", config, params)
        save_converted(tmp_path / other / "converted", config, params)
        for folder in (tmp_path / other).iterdir():
            assert_same_bits(load(folder)[1], params)
            assert_same_bits(load(folder, other)[1], jax.tree.map(methodcaller("astype", other), params))
    held = stored.headers(tmp_path / "bfloat16/written")
    for source in checkpoint.sources_of(CONFIG).values():
        for piece in source.pieces:
            found = stored.read_piece(held[piece.tensor], piece)
            assert found.shape == piece.shape_read
            lanes = 1 if piece.lane is None else piece.lane[1]  # which lie too close to be read apart
            assert found.base is None or found.base.nbytes == lanes * found.nbytes  # no view of a larger tensor


def test_tensors_hold_the_rows_that_the_layouts_say(tmp_path, monkeypatch):
    """Fused ones are those of transformers, in `test_golden.py`."""
    params = random_params(CONFIG)
    held = {}
    for layout in (divided, woven):
        as_family(layout, monkeypatch)
        write_hugging_face(tmp_path / layout.__name__, CONFIG, params)
        held |= load_file(tmp_path / layout.__name__ / "model.safetensors")
    second = params.layers[1]
    np.testing.assert_array_equal(held["embed.b"], params.embedding.array[7:])
    np.testing.assert_array_equal(held["keys.3"], second.k.array[3])
    np.testing.assert_array_equal(held["model.layers.1.woven"][:, ::2], second.gate.array.T)
    np.testing.assert_array_equal(held["model.layers.1.woven"][:, 1::2], second.up.array.T)


@pytest.mark.parametrize(("layout", "name"), [(fused, "model.layers.1.self_attn.qkv_proj.weight"), (divided, "keys.3")])
def test_a_damaged_layout_is_refused_in_one_sentence(tmp_path, monkeypatch, layout, name):
    as_family(layout, monkeypatch)
    write_hugging_face(tmp_path, CONFIG, random_params(CONFIG))
    file = tmp_path / "model.safetensors"
    tensors = {key: array.copy() for key, array in load_file(file).items() if key != name}
    for changed, words in (
        (tensors, f"lack the tensor {name}"),
        (tensors | {name: np.zeros((3, 16), np.float32)}, rf"{name} has shape \[3, 16\] but "),
    ):
        save_file(changed, file)
        with pytest.raises(UsageError, match=words):
            load(tmp_path)


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
    ("given", "words"),
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
def test_sources_that_leave_out_or_repeat_a_row_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        check_sources(given, SHAPES)
    check_sources(of_one((4, 6), (0, 4)), SHAPES)
