"""The model card says what was measured."""

import json

import pytest
from small_runs import run_folder

from et_jax.errors import UsageError
from et_jax.training import card, loop


def test_losses_by_position_add_up(settings, data):
    figures = card.measure(loop.initial_state(settings).params, settings, data[2])
    parts = [(end - begin) * loss for (begin, end), loss in figures.by_position.items()]
    assert sum(parts) / 32 == pytest.approx(figures.per_token[32], rel=0.1)  # padding thins the last positions


def test_the_card_has_stages_accuracies_and_the_hours_of_resumed_runs(mixed_settings, mixed_data, tmp_path):
    run = run_folder(tmp_path)
    cells = [("passkey", 128, 0.0, 1.0), ("passkey", 128, 1.0, 0.5), ("counting", 256, 0.0, 0.25)]
    names = ("task", "length", "depth", "accuracy")
    rows = [dict(zip(names, cell, strict=True)) | {"examples": 8} for cell in cells]
    (tmp_path / "accuracy.json").write_text(json.dumps({"haystack": "wells.txt", "summary": rows}))
    told = card.Run(
        folder=run, step=8, hardware="a test", history="Begun again twice.", accuracy=tmp_path / "accuracy.json"
    )
    figures = card.Figures(per_token={128: 4.25, 256: 4.125}, by_position={(0, 256): 4.125})
    arguments = (figures, mixed_settings, told, mixed_data[2], tmp_path / "README.md")
    with pytest.raises(UsageError, match="ngram_baseline"):
        card.write_card(*arguments)
    (run / "ngram.json").write_text(json.dumps({"order": 5, "train_tokens": 9, "per_token": 4.0, "per_byte": 1.0}))
    card.write_card(*arguments)
    text = (tmp_path / "README.md").read_text()
    for part in (
        "128 from step 0, 256 from step 5",
        "25% of them novels",  # all eight steps are below the first share
        "| passkey | 128 | 0.75 | 1.00 | 0.50 |",
        "| counting | 256 | 0.25 | 0.25 |  |",
        "Begun again twice.",
        "--recipe long --from runs/short/model --steps 8 --seed 0",
        "in 1.5 hours on a test",
        "0.125 nats per token worse than the 5-gram",
    ):
        assert part in text
