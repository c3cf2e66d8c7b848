"""What was measured of a model, beside it: written, read, refused; the fingerprint by which it is found."""

import numpy as np
import pytest
from places import GOLDEN
from small_model import MODEL

from et_jax.errors import UsageError
from et_jax.io.gguf import parts_of, read_gguf
from et_jax.models.calibration import Calibration, keep_calibration, read_calibration, write_calibration
from et_jax.models.checkpoint import read_config
from et_jax.models.fingerprint import fingerprint
from et_jax.models.packaged import PACKAGED, packaged_file
from et_jax.types import Table
from scripts.peers.gguf_file import write_gguf

SHAPE = MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size


def test_what_is_kept_is_found_by_the_weights_and_what_a_folder_says_counts_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "model.safetensors"
    table, other = (Table(np.arange(at, at + np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) / 8) for at in (1, 2))
    weights.write_bytes(b"weights")
    kept = keep_calibration(tmp_path, Calibration(temperature=1.5, sensitivity=table), {"rows": 6})
    assert read_calibration(tmp_path, MODEL) == Calibration(temperature=1.5, sensitivity=table)
    weights.write_bytes(b"others")
    assert read_calibration(tmp_path, MODEL) == Calibration()
    write_calibration(tmp_path, Calibration(temperature=2.0), {})
    kept.rename(kept.with_name(f"{fingerprint(tmp_path)}.json"))
    assert read_calibration(tmp_path, MODEL) == Calibration(temperature=2.0, sensitivity=table)
    write_calibration(tmp_path, Calibration(temperature=1.0625, sensitivity=other), {"tokens": 100})
    assert read_calibration(tmp_path, MODEL) == Calibration(temperature=1.0625, sensitivity=other)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGED)
def test_models_that_packages_carry_come_measured(name, tmp_path, monkeypatch):
    try:
        file = packaged_file(name)
    except UsageError:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_calibration(file, read_config(file)).sensitivity is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"temperature": NaN}',
        "\udcff",
        '{"temperature": 1.0, "sensitivity": [[[1.0]]]}',
        '{"temperature": 1.0, "sensitivity": [[[1.0, 2.0], [3.0]]]}',
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "calibration.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError, match=r"calibration\.json"):
        read_calibration(tmp_path, MODEL)


def test_what_was_never_measured_is_refused_when_it_is_made():
    odd = [{"temperature": value} for value in (None, "x", 0, -1.0, np.nan, np.inf, 10**400, True)]
    odd += [{"sensitivity": value} for value in (1.0, "x", np.ones((1, 1, 1)), [[[1.0]]])]
    odd += [{"sensitivity": Table(rows)} for rows in (1.0, [1.0], [[[1]]], [[["x"]]], [[[np.nan]]], [[[-1.0]]], None)]
    for changes in odd:
        made = Calibration.__new__(Calibration)  # as where no types are checked
        for name, value in ({"temperature": 1.0, "sensitivity": None} | changes).items():
            object.__setattr__(made, name, value)
        with pytest.raises(UsageError, match=f"^{next(iter(changes))} "):
            made.__post_init__()


def test_any_change_that_matters_shows(tmp_path):
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(bytes(10_000_000))
    (tmp_path / "README.md").write_text("a")
    seen = [fingerprint(tmp_path)]
    (tmp_path / "README.md").write_text("b")
    assert fingerprint(tmp_path) == seen[0]
    (tmp_path / "config.json").write_text("[]")
    seen.append(fingerprint(tmp_path))
    for trained in (b"\1" * 10_000_000, b"\1" * 10_000_001, b"\1" * 10_000_000 + b"\2"):
        weights.write_bytes(trained)
        seen.append(fingerprint(tmp_path))
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "part").write_text("a")
    seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("parts", [0, 3])
def test_a_changed_weight_of_a_gguf_file_shows_in_any_part_and_its_name_does_not(tmp_path, parts):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "llama2", parts=parts)
    first = min(tmp_path.iterdir())
    seen = [fingerprint(first)]
    for part in parts_of(first):
        place = next(place for place in read_gguf(first).tensors.values() if place.file == part)
        data = bytearray(part.read_bytes())
        data[place.begin + 5] ^= 1
        part.write_bytes(data)
        seen.append(fingerprint(first))
    assert len(set(seen)) == len(seen) == 1 + len(parts_of(first)) and (len(seen) > 2) == bool(parts)
    for part in parts_of(first):
        part.rename(part.with_name(part.name.replace("model", "other")))
    assert fingerprint(min(tmp_path.iterdir())) == seen[-1]
