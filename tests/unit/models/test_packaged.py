"""Models in installed packages: found without an import, put together from parts, and checked by their sums."""

import hashlib
import sys

import pytest

from et_jax.errors import UsageError
from et_jax.models import packaged
from et_jax.models.local import local_model
from et_jax.models.packaged import PACKAGED, Packaged


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Two packages with a part each, which cannot be imported, and a cache of their own."""
    for name, content in (("one_part", b"GG"), ("other_part", b"UF")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import a_module_that_is_absent")
        (tmp_path / name / "part").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Packaged(
        install="pip install model",
        parts=(("one_part", "part"), ("other_part", "part")),
        sha256=hashlib.sha256(b"GGUF").hexdigest(),
    )
    monkeypatch.setitem(PACKAGED, "smollm2", model)
    return tmp_path


def test_a_model_in_parts_is_put_together_once(parts, monkeypatch):
    file = local_model("smollm2")
    assert file == parts / "cache/et_jax/models/smollm2.gguf"
    assert (parts / "cache/et_jax/models/smollm2.gguf").read_bytes() == b"GGUF"
    assert "one_part" not in sys.modules
    monkeypatch.setattr(packaged.hashlib, "sha256", None)  # the sum of the same file is not worked out again
    assert local_model("smollm2") == file


def test_a_damaged_or_absent_package_names_the_command_that_installs_it(parts):
    (parts / "other_part/part").write_bytes(b"XX")
    with pytest.raises(UsageError, match=r"is damaged .* pip install model --force-reinstall"):
        local_model("smollm2")
    (parts / "other_part/part").unlink()
    with pytest.raises(UsageError, match="smollm2 is not installed; run: pip install model"):
        local_model("smollm2")
