"""Few sequences in an engine of many slots: the same texts in programs of fewer rows, made once and kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

# What a process prints: how many steps and rows were run, and the texts with all that is told of their tokens.
SCRIPT = '''
import dataclasses, json, sys, time
import et_jax

model = et_jax.load("bundled-small", max_num_seqs=8, max_model_len=128, prefix_cache=False)
asked = [dict(temperature=0.9, seed=number, ignore_eos=True, max_tokens=20 + 30 * (number == 1)) for number in range(5)]

def told(completions):
    """Print what was run, and all that is known of the texts but for charges, which depend on the company."""
    rows = [(one.text, [dataclasses.replace(row, cost=0.0) for row in one.trace]) for one in completions]
    metrics = model.metrics
    print(json.dumps([metrics.steps, metrics.step_rows, metrics.programs_compiled_late, repr(rows)]))

def alone():
    told([model.generate("It was", **settings)[0] for settings in asked])

alone()
if "make" in sys.argv:
    model.decoder().decode.seconds = 0.0  # as long as the bursts of few sequences took
    model.generate("It was", **asked[1])
[replica] = model.replicas().replicas
while replica.device.making:
    time.sleep(0.01)
told([])
alone()
requests = [et_jax.GenerationRequest(prompt="It was", params=et_jax.SamplingParams(**settings)) for settings in asked]
told(model.generate(requests))
'''


def ran(folder: Path, *arguments: str) -> list[list[Any]]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_text_has_the_same_bits_in_a_program_of_few_rows_which_the_next_process_finds(tmp_path):
    for arguments in ["make"], []:
        before, ready, few, together = ran(tmp_path, *arguments)
        if arguments:
            assert before[1] == 8 * before[0] and before[0] >= 130
            expected = before[3]
        assert few[1] - ready[1] == 2 * (few[0] - ready[0]) > 0
        steps, rows = together[0] - few[0], together[1] - few[1]
        assert 2 * steps < rows < 8 * steps  # the longest ends alone
        assert before[3] == few[3] == together[3] == expected and len(expected) > 10_000
        assert {one[2] for one in (before, ready, few, together)} == {0}
