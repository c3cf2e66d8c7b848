"""What a model was taken for, where its files say otherwise than their owner may expect: logged, and described."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import et_jax
from et_jax.models.bundled import bundled_folder
from et_jax.serve.config import EngineConfig
from et_jax.serve.verdict import verdict


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(bundled_folder("bundled-small"), tmp_path / "model")


def rewrite(folder, alter, **said):
    file = folder / "model.safetensors"
    save_file(alter({name: array.copy() for name, array in load_file(file).items()}), file)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | said))


def loaded(folder, caplog, **settings):
    caplog.clear()
    with et_jax.load(str(folder), max_num_seqs=1, max_model_len=64, compilation_cache=None, **settings) as model:
        return model.describe(), [*caplog.messages], model


def planned(described):
    """The bytes of weights that were planned for."""
    [size] = [f"{line.split()[1]} MB" for line in described if line.startswith("weights ")]
    return size


def ties(model):
    """Whether each model that the decoder runs has its embedding for a head."""
    return [vars(each)["tie_embeddings"] for each in model.decoder_config.models]


def test_float16_weights_are_reported_where_they_become_float32(folder, caplog):
    def half(tensors):
        return {name: array.astype(np.float16) for name, array in tensors.items()}

    assert loaded(folder, caplog)[1] == []
    assert not any("(from float16" in line for line in verdict(EngineConfig(name=str(folder))))
    rewrite(folder, half)  # config.json says bfloat16 still, as where a file was converted by itself
    described, [said], model = loaded(folder, caplog)
    assert f"{planned(described)} float32" in described[0]
    assert said in described and "float16 weights are converted to float32" in said
    assert model.decoder_config.dtype == jnp.float32
    for dtype in ("bfloat16", "float32"):
        assert loaded(folder, caplog, dtype=dtype)[1] == []
    rewrite(folder, dict, torch_dtype="float16")
    checked = verdict(EngineConfig(name=str(folder)))
    assert any(line.startswith("weights in float32 (from float16; --dtype bfloat16 takes half)") for line in checked)


def test_a_head_that_config_json_ties_is_reported_for_every_model(folder, caplog):
    def with_head(tensors):
        return tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}

    rewrite(folder, with_head)
    described, [said], model = loaded(folder, caplog)
    assert said in described and said.startswith(f"{folder}: config.json ties") and ties(model) == [False]
    described, [said], model = loaded("bundled", caplog, draft=str(folder))
    assert said in described and said.startswith(f"{folder}: config.json ties")
    assert ties(model) == [True, False]
