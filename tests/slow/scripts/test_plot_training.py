"""The curves of a run: every step once, the later record where it was done twice, and a picture of them."""

import json

import pytest
from scripts_here import script

from et_jax.errors import UsageError

LOG = [
    {"step": 20, "loss": 5.0, "length": 128},
    {"step": 40, "loss": 4.5, "length": 128, "held_out_per_token": 4.4, "accuracy/passkey": 0.5},
    {"step": 60, "loss": 4.4, "length": 256},
    {"step": 40, "loss": 4.0, "length": 128, "held_out_per_token": 4.2, "accuracy/passkey": 0.75},
    {"step": 80, "loss": 3.9, "length": 256, "held_out_per_token": 4.1, "accuracy/passkey": 1.0},
]


def test_a_step_counts_as_it_was_done_last_and_is_drawn(tmp_path):
    plot = script("plot_training")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in LOG))
    found = plot.records(tmp_path / "log.jsonl")
    assert [(record["step"], record["loss"]) for record in found] == [(20, 5.0), (40, 4.0), (60, 4.4), (80, 3.9)]
    assert plot.curves(found) == {
        "held_out_per_token": ([40, 80], [4.2, 4.1]),
        "accuracy/passkey": ([40, 80], [0.75, 1.0]),
    }
    plot.draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"name the log\.jsonl"):
        script("plot_training").records(tmp_path / "absent.jsonl")
