"""Programs that processes side by side keep for one another."""

import os
import subprocess
import sys

from places import ROOT


def test_processes_side_by_side_and_after_one_another_write_one_completion(tmp_path):
    command = [sys.executable, "-m", "et_jax.generate", "--model", "bundled-small", "--prompt", "It was", "--seed", "3"]
    command += ["--max-tokens", "12", "--control", "certified", "--json"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def start() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)

    def said(process: subprocess.Popen[str]) -> tuple[str, str]:
        completion, words = process.communicate(timeout=600)
        assert process.returncode == 0, words
        return completion, words

    completions = {said(process)[0] for process in [start(), start()]}
    settled, _ = said(start())  # where the second replaced what the first had kept
    again, words = said(start())
    assert completions == {settled} == {again}
    assert "programs ready: 0.0 s tracing, 0.0 s compiling" in words
