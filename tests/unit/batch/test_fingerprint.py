"""The fingerprint of a model changes with what its files hold."""

from et_jax.batch.fingerprint import fingerprint


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


def test_every_byte_of_a_small_file_counts(tmp_path):
    small = tmp_path / "model.safetensors"
    seen = set()
    for place in range(0, 2**22, 2**16):
        data = bytearray(2**22)
        data[place] = 1
        small.write_bytes(data)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 64
