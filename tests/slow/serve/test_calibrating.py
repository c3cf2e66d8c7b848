"""A model that was not measured is measured as it is loaded, once, where the control goes by that."""

import json
import shutil

import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH, Plain

import et_jax
from et_jax import calibrate
from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import EQUAL, read_calibration
from et_jax.models.checkpoint import read_config
from et_jax.models.module import ModuleConfig
from et_jax.serve.loading import calibrating
from et_jax.text import load_tokenizer

pytestmark = pytest.mark.usefixtures("hardly_optimised")

ADAPTIVE = preset("adaptive")  # at every length, which the preset by its name is not on a CPU
SIZES = {"max_num_seqs": 2, "compilation_cache": None, "control": ADAPTIVE}


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """A model without calibration.json, and a cache with nothing in it; texts are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrating, "ROWS", 2)
    monkeypatch.setattr(calibrating, "LENGTH", 64)
    folder = shutil.copytree(bundled_folder("bundled-small"), tmp_path / "model")
    (folder / "calibration.json").unlink()
    return folder


def sensitivity(model: et_jax.Model) -> np.ndarray:
    table = model.decoder_config.calibration.sensitivity
    assert table is not None
    return table.array


def test_adaptive_measures_a_model_once_and_keeps_it(unmeasured, tmp_path):
    said = []
    model = et_jax.load(str(unmeasured), progress=said.append, **SIZES)
    assert any("row 2 of 2" in line for line in said)
    [kept] = (tmp_path / "cache/et_jax/calibrations").iterdir()
    assert any(f"stored in {kept}" in line for line in said)
    assert model.decoder_config.calibration.temperature == 1.0 and (sensitivity(model) > 0).all()
    assert model.generate("It was", max_tokens=3)[0].finish_reason == "length"
    said.clear()
    again = et_jax.load(str(unmeasured), progress=said.append, **SIZES)
    assert not any("row 1 of 2" in line for line in said)
    np.testing.assert_array_equal(sensitivity(again), sensitivity(model))


def test_without_calibration_all_heads_count_alike(unmeasured, tmp_path, caplog):
    model = et_jax.load(str(unmeasured), calibration="none", **SIZES)
    assert (sensitivity(model) == np.float32(EQUAL)).all()
    assert "calibration none" in caplog.text and not (tmp_path / "cache/et_jax/calibrations").exists()


def test_a_control_of_one_call_is_refused_where_nothing_was_measured(unmeasured):
    model = et_jax.load(str(unmeasured), **SIZES | {"control": "off"})
    with pytest.raises(UsageError, match=r"run python -m et_jax.calibrate --model .*model, or choose certified\.$"):
        model.generate("It was", control=ADAPTIVE)


def test_a_module_is_measured_for_the_run(monkeypatch):
    monkeypatch.setattr(calibrating, "ROWS", 1)
    said, tokenizer = [], load_tokenizer(bundled_folder())
    module = Plain(4096, rngs=nnx.Rngs(3))
    own = {"config": ModuleConfig(max_positions=LENGTH), "tokenizer": tokenizer, "progress": said.append}
    model = et_jax.load(module, page_size=8, prefill_batch=32, **own, **SIZES)
    assert (sensitivity(model) > 0).all()
    assert "ModuleConfig(calibration=...) reuses it." in "".join(said)


def test_the_command_measures_and_writes(unmeasured, tmp_path, capfd):
    length = ["--rows", "2", "--length", "48"]
    assert calibrate.main(["--model", str(unmeasured), *length, "--output", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "calibration.json").read_text())
    about = {"model": "model", "text": "text.txt", "rows": 2, "row_tokens": 48, "tokens": 48, "dtype": "float32"}
    assert {name: facts[name] for name in about} == about and "2 rows of 48 tokens" in capfd.readouterr().out
    assert facts["nats_per_token"] <= facts["nats_per_token_at_1"]
    assert read_calibration(tmp_path, read_config(unmeasured)).sensitivity is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "absent.txt"], "The text absent.txt cannot be read"),
        (["--rows", "0"], "--rows is 0; it must be at least 1."),
        (["--rows", "99"], "text.txt has 4061 tokens and 99 rows of 64 were asked for; ask for fewer."),
        (["--length", "4096"], "was made for 2048 tokens."),
        (["--output", "absent/folder"], "cannot be written"),
        (["--model", "bundled"], "is read before the cache; replace it with --output"),
        (["--model", "nothing"], "nothing is neither a folder nor a hub name"),
    ],
)
def test_what_cannot_be_measured_ends_in_a_sentence(unmeasured, flags, said, capfd, monkeypatch):
    monkeypatch.setattr(calibrating, "floats", lambda *_: pytest.fail("weights were read"))
    assert calibrate.main(["--model", str(unmeasured), *flags]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
