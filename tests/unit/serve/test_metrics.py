"""Counters, and their text read back by a reader of its own."""

import re
from pathlib import Path

import pytest

from et_jax.errors import UsageError
from et_jax.serve.compilation import Made
from et_jax.serve.metrics import Metrics


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Read the exposition format by its grammar: every sample after the HELP and TYPE of its family."""
    families: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    helped, name = set(), ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if match := re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            assert match[1] not in helped
            helped.add(match[1])
        elif match := re.fullmatch(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) counter", line):
            name = match[1]
            assert name in helped and name not in families and name.endswith("_total")
            families[name] = {}
        else:
            match = re.fullmatch(
                r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\]|\\["\\n])*",?)*)\})? (\S+)', line
            )
            assert match and match[1] == name, line
            labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            plain = tuple((k, re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v)) for k, v in labels)
            assert plain not in families[name]
            families[name][plain] = float(match[3])
    return families


def test_every_counter_is_written_under_its_name():
    metrics = Metrics(prompt_tokens=3, generated_tokens=12, entropic_time=1.5, cost=2.5e12, waiting_seconds=0.25)
    metrics.steps, metrics.drafted_tokens, metrics.accepted_tokens, metrics.small_tokens = 7, 5, 2, 4
    metrics.finish("stop")
    metrics.finish("length")
    metrics.finish("stop")
    metrics.add_programs(Made(programs=3, tracing=1.5, compiling=2.5, loading=0.5))
    strange = 'a "b"\\n\nc'
    metrics.finish(strange)
    found = parse(metrics.prometheus())
    assert found == {
        "et_jax_requests_finished_total": {
            (("reason", "length"),): 1,
            (("reason", "stop"),): 2,
            (("reason", strange),): 1,
        },
        "et_jax_prompt_tokens_total": {(): 3},
        "et_jax_cached_prompt_tokens_total": {(): 0},
        "et_jax_generated_tokens_total": {(): 12},
        "et_jax_drafted_tokens_total": {(): 5},
        "et_jax_accepted_tokens_total": {(): 2},
        "et_jax_small_tokens_total": {(): 4},
        "et_jax_steps_total": {(): 7},
        "et_jax_step_rows_total": {(): 0},
        "et_jax_idle_rows_total": {(): 0},
        "et_jax_preemptions_total": {(): 0},
        "et_jax_programs_compiled_total": {(): 3},
        "et_jax_programs_compiled_late_total": {(): 0},
        "et_jax_tracing_seconds_total": {(): 1.5},
        "et_jax_compiling_seconds_total": {(): 2.5},
        "et_jax_loading_seconds_total": {(): 0.5},
        "et_jax_entropic_time_nats_total": {(): 1.5},
        "et_jax_cost_bytes_total": {(): 2.5e12},
        "et_jax_flops_total": {(): 0},
        "et_jax_idle_cost_bytes_total": {(): 0},
        "et_jax_idle_flops_total": {(): 0},
        "et_jax_waiting_seconds_total": {(): 0.25},
        "et_jax_serving_seconds_total": {(): 0},
    }


def test_the_file_is_replaced_at_once_where_it_can_be(tmp_path):
    path = tmp_path / "metrics.txt"
    Metrics(steps=1).write(path)
    with path.open() as reader:
        Metrics(steps=2).write(path)
        assert "et_jax_steps_total 1\n" in reader.read()  # a reader that was there sees the old file to its end
    assert "et_jax_steps_total 2\n" in path.read_text() and list(tmp_path.iterdir()) == [path]
    for where in ("/proc/nowhere/metrics", "/dev/full", "."):
        with pytest.raises(UsageError, match="choose another file"):
            Metrics().write(Path(where))
