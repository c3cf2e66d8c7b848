"""Leaves that are not a tensor each: read piece by piece, and sources that leave a row out or repeat one refused.

That fused and stacked layouts are read and written as transformers does stands in `test_golden.py`.
"""

import shutil

import numpy as np
import pytest
from places import GOLDEN
from safetensors.numpy import load_file, save_file

from et_jax.errors import UsageError
from et_jax.models import stored
from et_jax.models.checkpoint import load, read_config, sources_of
from et_jax.models.sources import Piece, Source, check_sources


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "mixtral"])
def test_of_a_tensor_only_the_rows_of_the_piece_are_read(family):
    held = stored.headers(GOLDEN / family)
    pieces = [piece for source in sources_of(read_config(GOLDEN / family)).values() for piece in source.pieces]
    assert any(not piece.is_whole for piece in pieces) or family == "mixtral"
    for piece in pieces:
        found = stored.read_piece(held[piece.tensor], piece)
        assert found.shape == piece.shape_read
        lanes = 1 if piece.lane is None else piece.lane[1]  # which lie too close to be read apart
        assert found.base is None or found.base.nbytes == lanes * found.nbytes  # no view of a larger tensor


def test_a_damaged_fused_tensor_is_refused_in_one_sentence(tmp_path):
    folder, name = tmp_path / "model", "model.layers.1.self_attn.qkv_proj.weight"
    shutil.copytree(GOLDEN / "phi3", folder)
    tensors = {key: array.copy() for key, array in load_file(folder / "model.safetensors").items() if key != name}
    for changed, words in (
        (tensors, f"lack the tensor {name}"),
        (tensors | {name: np.zeros((3, 16), np.float32)}, rf"{name} has shape \[3, 16\] but "),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UsageError, match=words):
            load(folder)


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
