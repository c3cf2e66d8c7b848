"""What a model was taken for, where its files say otherwise than their owner may expect: logged, and described."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

import et_jax
from et_jax.models.bundled import bundled_folder


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


def ties(model):
    """Whether each model that the decoder runs has its embedding for a head."""
    return [vars(each)["tie_embeddings"] for each in model.decoder_config.models]


def test_a_head_that_config_json_ties_is_reported_for_every_model(folder, caplog):
    def with_head(tensors):
        return tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}

    rewrite(folder, with_head)
    described, [said], model = loaded(folder, caplog)
    assert said in described and said.startswith(f"{folder}: config.json ties") and ties(model) == [False]
    described, [said], model = loaded("bundled", caplog, draft=str(folder))
    assert said in described and said.startswith(f"{folder}: config.json ties")
    assert ties(model) == [True, False]
