"""A state in few bytes, to go on from."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from places import ROOT
from safetensors.numpy import load_file
from small_runs import losses, run

from et_jax.errors import UsageError
from et_jax.training import compact, loop, recipe


@pytest.mark.slow
def test_a_compact_state_keeps_the_weights_and_rounds_the_memory(mixed_settings, mixed_data, tmp_path):
    run(mixed_settings, mixed_data, tmp_path / "run", 3)
    state, step = loop.load_state(tmp_path / "run", mixed_settings)
    size = compact.write(state, step, tmp_path / "kept")
    assert size == sum(file.stat().st_size for file in (tmp_path / "kept").iterdir())
    found, done = compact.read(tmp_path / "kept", mixed_settings)
    assert done == step == 3
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2**-8), found.optimizer, state.optimizer)
    assert jax.tree.map(lambda x: x.dtype, found.optimizer) == jax.tree.map(lambda x: x.dtype, state.optimizer)
    assert run(mixed_settings, mixed_data, tmp_path / "on", 4, start=(found, done)) == 4
    assert set(losses(tmp_path / "on")) == {4}


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
