"""Where a model is found: folders, installed packages, the hub, and what each refuses."""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from test_checkpoint import CONFIG, random_params

from et_jax.errors import UsageError
from et_jax.models import packaged
from et_jax.models.checkpoint import load, write_hugging_face
from et_jax.models.hub import http_error, resolve
from et_jax.models.local import local_model
from et_jax.models.packaged import PACKAGED, Packaged


@pytest.fixture
def folder(tmp_path):
    write_hugging_face(tmp_path / "model", CONFIG, random_params())
    return tmp_path / "model"


class Hub:
    """A hub of one model: serves the files of `folder` and notes what was asked of it."""

    def __init__(self, monkeypatch, folder=None, error=None, reached=None):
        self.folder, self.error, self.asked, self.local = folder or Path(), error, [], []
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", Mock(side_effect=reached))

    def download(self, repository, name="", allow_patterns=(), local_files_only=False):
        self.local.append(local_files_only)
        self.asked.append((repository, name or tuple(allow_patterns)))
        if self.error:
            raise self.error
        return str(self.folder / name)


def test_a_hub_name_brings_the_config_first(monkeypatch, folder):
    hub = Hub(monkeypatch, folder)
    assert resolve("owner/model-1.5b") == folder
    assert hub.asked[0] == ("owner/model-1.5b", "config.json")
    repository, patterns = hub.asked[1]
    assert repository == "owner/model-1.5b"
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
    taken = [file for file in files if any(Path(file).match(pattern) for pattern in patterns)]
    assert taken == files[:2]


def test_a_hub_out_of_reach_is_asked_once_and_then_the_cache(monkeypatch, folder):
    library = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.split(".")[0])
    for error in (errors.OfflineModeIsEnabled(""), library.ConnectError("Name or service not known")):
        hub = Hub(monkeypatch, folder, reached=error)
        assert resolve("owner/model") == folder and hub.local == [True, True]


def test_a_config_that_cannot_be_is_refused_before_a_weight_is_fetched_or_read(monkeypatch, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    hub = Hub(monkeypatch, folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    for attempt in (lambda: resolve("owner/model"), lambda: load(folder)):
        with pytest.raises(UsageError, match="MambaForCausalLM"):
            attempt()
    assert hub.asked == [("owner/model", "config.json")]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("owner/model", errors.GatedRepoError("", response=Mock()), "gated: accept its terms"),
        (
            "owner/model",
            errors.RepositoryNotFoundError("", response=Mock()),
            "here nor a model on the hub",
        ),
        ("owner/model", errors.LocalEntryNotFoundError(""), "cannot be reached"),
        ("owner/model", http_error()("peer closed\nincomplete"), r"could not be downloaded \(peer closed\)"),
        ("a" * 5000, None, "check the spelling"),
        ("a\0b", None, "check the spelling"),
        ("no-such-folder", None, "neither a folder nor a hub name"),
    ],
)
def test_what_the_hub_refuses_or_is_never_asked_is_told_in_one_sentence(monkeypatch, name, error, words):
    hub = Hub(monkeypatch, error=error)
    with pytest.raises(UsageError, match=words) as refusal:
        resolve(name)
    said = str(refusal.value)
    assert len(said) < 300 and "\n" not in said
    assert hub.asked == [] if error is None else name in said


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
