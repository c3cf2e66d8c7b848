"""A state in few bytes, to go on from."""

import json

import jax
import numpy as np
import pytest
from places import ROOT
from safetensors.numpy import load_file

from et_jax.errors import UsageError
from et_jax.training import compact, recipe


def test_the_state_kept_beside_the_code_can_be_continued_by_its_own_recipe(mixed_settings, tmp_path):
    folder = ROOT / "models/bundled-small-training"
    for given, words in ((tmp_path, "no training state"), (folder, "another model")):
        with pytest.raises(UsageError, match=words):
            compact.read(given, mixed_settings)
    state, step = compact.read(folder, recipe.small_settings())
    assert step == json.loads((folder / "step.json").read_text())["step"]
    kept = load_file(folder / "weights.safetensors")
    assert len(kept) == len(jax.tree.leaves(state.params))
    np.testing.assert_array_equal(state.params.embedding.array, kept[".embedding"])
    np.testing.assert_array_equal(state.params.layers[0].q.array, kept[".layers[0].q"])
