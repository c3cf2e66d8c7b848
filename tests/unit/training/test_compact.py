"""A state in few bytes, to go on from."""

import dataclasses
import json

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
    for kept, before in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params), strict=True):
        assert bool((kept == before).all())
    for kept, before in zip(jax.tree.leaves(found.optimizer), jax.tree.leaves(state.optimizer), strict=True):
        assert kept.dtype == before.dtype
        np.testing.assert_allclose(kept, before, rtol=2**-8)
    assert run(mixed_settings, mixed_data, tmp_path / "on", 5, start=(found, done)) == 5
    assert run(mixed_settings, mixed_data, tmp_path / "run", 5) == 5
    on, whole = losses(tmp_path / "on"), losses(tmp_path / "run")
    assert set(on) == {4, 5}
    assert on[4] == whole[4]  # the memory first acts on the step after
    assert on[5] == pytest.approx(whole[5], rel=1e-3)


def test_a_compact_state_of_another_model_is_refused(mixed_settings, mixed_data, tmp_path):
    with pytest.raises(UsageError, match="no training state"):
        compact.read(tmp_path, mixed_settings)
    compact.write(loop.initial_state(mixed_settings), 0, tmp_path)
    other = dataclasses.replace(mixed_settings, model=dataclasses.replace(mixed_settings.model, intermediate_size=64))
    with pytest.raises(UsageError, match="another model"):
        compact.read(tmp_path, other)


def test_the_state_kept_beside_the_code_can_be_continued():
    folder = ROOT / "models/bundled-small-training"
    state, step = compact.read(folder, recipe.small_settings())
    assert step == json.loads((folder / "step.json").read_text())["step"]
    kept = load_file(folder / "weights.safetensors")
    assert len(kept) == len(jax.tree.leaves(state.params))
    np.testing.assert_array_equal(state.params.embedding.array, kept[".embedding"])
    np.testing.assert_array_equal(state.params.layers[0].q.array, kept[".layers[0].q"])
