"""What a model was taken for, where its files say otherwise than their owner may expect: logged, and described."""

import shutil

from safetensors.numpy import load_file, save_file

import et_jax
from et_jax.models.bundled import bundled_folder


def test_a_head_that_config_json_ties_is_reported_for_every_model(tmp_path, caplog):
    folder = shutil.copytree(bundled_folder("bundled-small"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    for name, settings, ties in ((str(folder), {}, [False]), ("bundled", {"draft": str(folder)}, [True, False])):
        caplog.clear()
        with et_jax.load(name, max_num_seqs=1, max_model_len=64, compilation_cache=None, **settings) as model:
            [said] = caplog.messages
            assert said in model.describe() and said.startswith(f"{folder}: config.json ties")
            assert [vars(each)["tie_embeddings"] for each in model.decoder_config.models] == ties
