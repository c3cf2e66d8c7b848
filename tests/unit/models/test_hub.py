"""Where a model is found: folders, the hub, and what either refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from test_checkpoint import CONFIG, random_params

from et_jax.errors import UsageError
from et_jax.models.checkpoint import load, write_hugging_face
from et_jax.models.hub import resolve

HTTP = errors.HfHubHTTPError.__bases__[0].__module__.split(".")[0]


@pytest.fixture
def folder(tmp_path):
    write_hugging_face(tmp_path / "model", CONFIG, random_params())
    return tmp_path / "model"


def test_a_local_folder_resolves_to_itself(folder):
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder


class Hub:
    """A hub of one model: serves the files of `folder` and notes what was asked of it."""

    def __init__(self, monkeypatch, folder=None, error=None):
        self.folder, self.error, self.asked, self.local = folder, error, [], []
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)

    def download(self, repository, name, local_files_only=False):
        self.local.append(local_files_only)
        self.asked.append((repository, name))
        if self.error:
            raise self.error
        return str(self.folder / name)

    def snapshot(self, repository, allow_patterns, local_files_only=False):
        self.local.append(local_files_only)
        self.asked.append((repository, tuple(allow_patterns)))
        return str(self.folder)


def test_a_hub_name_brings_the_config_first(monkeypatch, folder):
    hub = Hub(monkeypatch, folder)
    assert resolve("owner/model-1.5b") == folder
    assert hub.asked[0] == ("owner/model-1.5b", "config.json")
    repository, patterns = hub.asked[1]
    assert repository == "owner/model-1.5b"
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
    taken = [file for file in files if any(Path(file).match(pattern) for pattern in patterns)]
    assert taken == files[:2]


def test_an_unknown_architecture_is_refused_before_any_weight(monkeypatch, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    hub = Hub(monkeypatch, folder)
    with pytest.raises(UsageError, match="MambaForCausalLM"):
        resolve("owner/model")
    assert hub.asked == [("owner/model", "config.json")]
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UsageError, match="MambaForCausalLM"):
        load(folder)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("", response=Mock()), "gated: accept its terms"),
        (errors.RepositoryNotFoundError("", response=Mock()), "neither a folder here nor a model on the hub"),
        (errors.LocalEntryNotFoundError(""), "cannot be reached"),
        (errors.OfflineModeIsEnabled(""), "cannot be reached"),
        (errors.EntryNotFoundError(""), "no config.json"),
        (OSError("No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_sentence(monkeypatch, error, words):
    Hub(monkeypatch, error=error)
    with pytest.raises(UsageError, match=words) as refusal:
        resolve("owner/model")
    assert "owner/model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**6}, {"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"head_dim": -1}]
)
def test_a_config_of_no_size_is_refused_before_any_weight(monkeypatch, folder, change):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    hub = Hub(monkeypatch, folder)
    with pytest.raises(UsageError, match=next(iter(change))):
        resolve("owner/model")
    assert hub.asked == [("owner/model", "config.json")]


def test_a_hub_out_of_reach_is_asked_once(tmp_path):
    """In a process of its own, for the library reads its settings when it is imported."""
    program = (
        "import httpx2, huggingface_hub\n"
        "from et_jax.models.hub import resolve\n"
        "asked = []\n"
        "def send(self, request, **kwargs):\n"
        "    asked.append('owner/model' in str(request.url))\n"
        "    raise httpx2.ConnectError('Name or service not known')\n"
        "httpx2.Client.send = send\n"
        "try:\n"
        "    resolve('owner/model')\n"
        "except ValueError as error:\n"
        "    print(sum(asked), error)\n"
    ).replace("httpx2", HTTP)
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://hub.invalid"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.startswith("1 owner/model is not a folder here and the hub cannot be reached")
    assert done.stderr == ""


def test_a_model_that_was_fetched_before_needs_no_hub(monkeypatch, folder):
    hub = Hub(monkeypatch, folder)

    def unreachable(url, timeout):
        raise errors.OfflineModeIsEnabled("")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    assert resolve("owner/model") == folder
    assert hub.local == [True, True]


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/model", "a\0b", "/root\0/model"])
def test_a_name_that_no_system_knows_ends_in_one_sentence(name):
    with pytest.raises(UsageError) as refusal:
        resolve(name)
    assert len(str(refusal.value)) < 300 and "check the spelling" in str(refusal.value)


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such/folder", "owner/model/extra"])
def test_a_name_of_neither_kind_never_reaches_the_hub(monkeypatch, name):
    hub = Hub(monkeypatch)
    with pytest.raises(UsageError, match="neither a folder nor a hub name"):
        resolve(name)
    assert hub.asked == []


def test_a_file_is_no_folder(folder):
    with pytest.raises(UsageError, match="is a file"):
        resolve(folder / "model.safetensors")
