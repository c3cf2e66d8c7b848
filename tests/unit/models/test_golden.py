"""Every family equals transformers, read and written, by files that scripts/make_golden.py wrote."""

import jax
import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN
from safetensors.numpy import load_file

from et_jax.models.checkpoint import load, read_config, save_converted, write_hugging_face
from et_jax.models.families.registry import FAMILIES as REGISTERED

pytestmark = pytest.mark.usefixtures("hardly_optimised")
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def test_every_family_has_a_golden_file():
    assert len(FAMILIES) == 23
    assert {read_config(GOLDEN / name).architecture for name in FAMILIES} == set(REGISTERED)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    config, params = load(GOLDEN / family, "float32")
    golden = np.load(GOLDEN / family / "golden.npz")
    assert golden["logits"].std() > 1
    np.testing.assert_allclose(dense_logits(config, params, golden["tokens"]), golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss_mxfp4"])
def test_a_model_is_written_as_transformers_writes_it(family, tmp_path):
    config, params = load(GOLDEN / family)
    write_hugging_face(tmp_path / "written", config, params)
    assert read_config(tmp_path / "written") == config
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "written", GOLDEN / family))
    apart = [name for name in expected.keys() - found.keys() if not name.startswith(("vision_tower", "multi_modal"))]
    assert not apart
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    if family in ("phi3", "mixtral", "gpt_oss"):  # of fused and stacked layouts
        save_converted(tmp_path / "converted", config, params)
        jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "converted")[1], params)


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_mxfp4", "phi3", "qwen2_moe"])
def test_weights_in_8_bits_give_nearly_the_logits_whatever_is_stacked_or_fused(family):
    golden = np.load(GOLDEN / family / "golden.npz")
    config, params = load(GOLDEN / family, "float32", quantize="int8")
    off = np.abs(dense_logits(config, params, golden["tokens"]) - golden["logits"]).mean()
    assert 0 < off < 0.08 * golden["logits"].std()  # a few roundings to 127ths; a wrong scale would leave nothing
