"""The fingerprint of a model changes with what its files hold."""

import pytest
from places import GOLDEN

from et_jax.io.gguf import parts_of, read_gguf
from et_jax.models.fingerprint import fingerprint
from scripts.peers.gguf_file import write_gguf


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
