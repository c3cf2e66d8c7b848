"""Programs of whole decoders that are called untraced: other numbers of laws, and processes side by side."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from small_model import configuration, weights

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder
from et_jax.decode.draft import Drafting
from et_jax.decode.request import request

ROOT = Path(__file__).resolve().parents[3]


def lowered(controller: Controller, **settings) -> dict[str, str]:
    """Return the text of the programs of a decoder that run its laws."""
    config = configuration(controller=controller, **settings)
    bound, params = decoder(config), (weights(),)
    state, slot, pages = jax.eval_shape(bound.empty), np.int32(0), np.zeros(1, np.int32)
    arguments = {
        "prefill": (params, state, pages, np.zeros((1, config.chunk), np.int32), pages, np.zeros(1, bool)),
        "insert": (state, slot, request(config, [1], limit=3)),
        "step": (params, state),
        "decode": (params, state, slot, np.bool_(False)),
    }
    return {name: getattr(bound, name).lower(*given).as_text() for name, given in arguments.items()}


@pytest.mark.parametrize(
    "name, numbers, settings",
    [
        ("guarded", ({"tolerance": 0.1}, {"tolerance": 0.3}), {}),
        ("certified", ({"tolerance": 0.01}, {"tolerance": 0.03}), {"draft": Drafting()}),
    ],
    ids=["guarded", "certified"],
)
def test_the_numbers_of_laws_are_in_no_program(name, numbers, settings):
    """So that the structure of its laws alone names a program."""
    one, other = (preset(name, **given) for given in numbers)
    assert jax.tree.leaves(one) != jax.tree.leaves(other)
    assert lowered(one, **settings) == lowered(other, **settings)


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
