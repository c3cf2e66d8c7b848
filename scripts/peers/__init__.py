"""Engines in processes of their own, and the client that asks them: `worker.py` runs where an engine is installed."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from scripts.peers.gguf_file import written_once

NEEDS = {"et_jax": "et_jax", "llama.cpp": "llama_cpp", "transformers": "torch, transformers"}
INSTALLED_AS = {"et_jax": ".", "llama.cpp": "llama-cpp-python", "transformers": "torch transformers"}


class Engine:
    """A worker process with one engine. Raises UsageError where `python` lacks it, or the engine fails."""

    def __init__(self, engine: str, python: str, **environment: str) -> None:
        self.engine = engine
        given = os.environ | environment
        try:
            found = subprocess.run([python, "-c", f"import {NEEDS[engine]}"], capture_output=True, text=True, env=given)
        except OSError as error:
            raise UsageError(f"{python} cannot be run ({error.strerror}); name a Python that has {engine}.") from error
        if found.returncode:
            reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UsageError(f"{python} lacks {engine} ({reason}); there, pip install {INSTALLED_AS[engine]}.")
        command = [python, str(Path(__file__).with_name("worker.py")), engine]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
        self._process = subprocess.Popen(command, env=given, **pipes)
        self.versions = self._ask("versions")

    def load(self, model: str, form: str, batch: int, length: int, **settings: Any) -> None:
        """Have it load a folder's weights in a form, for `batch` sequences of at most `length` tokens."""
        if self.engine == "llama.cpp" and not model.endswith(".gguf"):
            model = str(written_once(Path(model), form))
        self._ask("load", model=model, form=form, batch=batch, length=length, **settings)

    def generate(self, prompts: list[list[int]], tokens: int) -> Any:
        """Return the seconds of a turn, to its end and to its first token, and its ids."""
        return self._ask("generate", prompts=prompts, tokens=tokens)

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts."""
        return self._ask("tokens", texts=texts)["ids"]

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Return the logits after every token of a prompt, "t v"."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits.npy"
            self._ask("logits", prompt=prompt, file=str(file))
            return np.load(file)

    def end(self) -> None:
        """Have it end, and wait until it has."""
        self._process.communicate()

    def _ask(self, do: str, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do} | request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        if "error" in answer:
            raise UsageError(f"{self.engine}: {answer['error']}")
        return answer
