"""An input on the hub: a server here answers as the hub does, and the hub library asks it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from places import ROOT
from stand_in import PaperModel

from et_jax.generate import main
from et_jax.serve import engine

pytestmark = pytest.mark.usefixtures("hardly_optimised")

FIRST, SECOND = "1" * 40, "2" * 40
LINES = "".join(json.dumps({"id": name, "prompt": f"It was {name}"}) + "\n" for name in ("a", "b"))
FLAGS = ("--max-tokens", "2", "--temperature", "0", "--model", "bundled-small")


class Hub(ThreadingHTTPServer):
    """The file `data` of the data set owner/name: its commit by revision, and the bytes of each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits, self.bytes = {"main": FIRST, FIRST: FIRST}, {FIRST: LINES.encode()}
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        repository, _, rest = self.path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        commit = self.server.commits.get(revision)
        checks = (
            (repository == "/datasets/owner/name", "Repo"),
            (commit, "Revision"),
            (file == "in/data.jsonl", "Entry"),
        )
        if absent := [what for found, what in checks if not found]:
            self.answer(404, {"X-Error-Code": f"{absent[0]}NotFound"})
        else:
            data = self.server.bytes[commit]
            self.answer(200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data)

    do_HEAD = do_GET

    def answer(self, code: int, headers: dict[str, str], data: bytes = b"") -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """The hub of this process, with a cache of its own; the model is of paper."""
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which the library reads once, whoever imports it first
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())
    monkeypatch.chdir(tmp_path)
    return hub


def texts(output) -> dict[str, str]:
    rows = map(json.loads, output.read_text().splitlines())
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}


def test_the_command_answers_a_file_on_the_hub_as_a_local_one(hub, tmp_path):
    (tmp_path / "in.jsonl").write_text(LINES)
    assert main(["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "local.jsonl"), *FLAGS]) == 0
    command = [sys.executable, "-m", "et_jax.generate", "--input", "hf://datasets/owner/name/in/data.jsonl"]
    command += ["--output", str(tmp_path / "out.jsonl"), *FLAGS]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "out.jsonl") == texts(tmp_path / "local.jsonl") != {}


def test_a_job_goes_on_with_the_commit_that_it_began_with(here, tmp_path, capfd):
    asked = ["-i", "hf://datasets/owner/name/in/data.jsonl", "-o", "out.jsonl"]
    assert main(asked) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    here.commits |= {"main": SECOND, SECOND: SECOND}
    here.bytes[SECOND] = LINES.encode() + b'{"id": "c", "prompt": "It is"}\n'
    assert main(asked) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    address = "hf://datasets/OWNER/NAME@COMMIT/FILE"
    assert f"the commit of --input, which {address} names, was {FIRST} and is {SECOND}" in said
    asked[1] = f"hf://datasets/owner/name@{FIRST}/in/data.jsonl"
    here.shutdown()
    here.server_close()  # the cache serves
    assert main(asked) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before


NAMED = "hf://datasets/owner/name"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("hf://owner/name/in/data.jsonl", "names no file on the hub; write hf://datasets/OWNER/NAME/FILE"),
        (f"{NAMED}/../data.jsonl", "names no file on the hub"),
        ("hf://datasets/owner/absent/in/data.jsonl", "is of no data set on the hub"),
        (f"{NAMED}@absent/in/data.jsonl", "names a revision that the data set does not have"),
        (f"{NAMED}/data.jsonl", "names a file that the data set does not have"),
    ],
)
def test_a_file_that_is_not_there_is_refused_in_one_sentence(here, tmp_path, capfd, address, words):
    assert main(["-i", address, "-o", "out.jsonl"]) == 2
    [said] = capfd.readouterr().err.splitlines()
    assert said.startswith(f"error: {address} {words}") and said.endswith(".")
    assert not (tmp_path / "out.jsonl").exists()


def test_without_the_hub_or_its_library_a_local_file_is_asked_for(here, capfd, monkeypatch):
    asked = ["-i", f"{NAMED}/in/data.jsonl", "-o", "out.jsonl"]
    here.shutdown()
    here.server_close()
    assert main(asked) == 2
    assert "was not downloaded before and the hub cannot be reached; go online" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(asked) == 2
    assert "needs huggingface_hub; install it with: pip install huggingface_hub." in capfd.readouterr().err
