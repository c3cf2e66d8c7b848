"""Model cards say what was measured, of a model trained on text and of a student."""

import dataclasses
import json

import numpy as np
import pytest
from small_runs import MIXED_WINDOW, SCHEDULE

from et_jax.errors import UsageError
from et_jax.training import card, corpus, loop, student_card
from et_jax.training.distillation import Teacher


@pytest.fixture
def told(tmp_path):
    """A run of an hour and a half, begun three times, and the accuracy of its model."""
    (tmp_path / "data").mkdir()
    for side, name in (("train", "a.txt"), ("held_out", "Kept_1850.txt")):
        (tmp_path / "data" / f"{side}.json").write_text(json.dumps({"works": [name], "starts": [0, 9]}))
    minutes = (3.0, 45.0, 2.0, 30.0, 1.0, 15.0)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"minutes": value}) + "\n" for value in minutes))
    cells = [("passkey", 128, 0.0, 1.0), ("passkey", 128, 1.0, 0.5), ("counting", 256, 0.0, 0.25)]
    names = ("task", "length", "depth", "accuracy")
    rows = [dict(zip(names, cell, strict=True)) | {"examples": 8} for cell in cells]
    (tmp_path / "accuracy.json").write_text(json.dumps({"haystack": "wells.txt", "summary": rows}))
    return card.Run(folder=tmp_path, step=8, hardware="a test", accuracy=tmp_path / "accuracy.json")


def test_the_card_has_losses_accuracies_and_the_hours_of_resumed_runs(settings, data, mixed_settings, mixed_data, told):
    found = card.measure(loop.initial_state(settings).params, settings, data[2])
    parts = [(end - begin) * loss for (begin, end), loss in found.by_position.items()]
    assert sum(parts) / 32 == pytest.approx(found.per_token[32], rel=0.1)  # padding thins the last positions
    figures = card.Figures(per_token={128: 4.25, 256: 4.125}, by_position={(0, 256): 4.125})
    arguments = (figures, mixed_settings, told, mixed_data[2], told.folder / "README.md")
    with pytest.raises(UsageError, match="ngram_baseline"):
        card.write_card(*arguments)
    baseline = {"order": 5, "train_tokens": 9, "per_token": 4.0, "per_byte": 1.0}
    (told.folder / "ngram.json").write_text(json.dumps(baseline))
    card.write_card(*arguments)
    text = (told.folder / "README.md").read_text()
    for part in (
        "128 from step 0, 256 from step 5",
        "25% of them novels",  # all eight steps are below the first share
        "| passkey | 128 | 0.75 | 1.00 | 0.50 |",
        "in 1.5 hours on a test",
        "0.125 nats per token worse than the 5-gram",
    ):
        assert part in text


@pytest.mark.slow
def test_the_card_of_a_student_says_how_near_it_has_come(mixed_settings, mixed_data, told):
    tokenizer, _, held_out = mixed_data
    schedule = dataclasses.replace(SCHEDULE, short_length=128, long_length=MIXED_WINDOW)
    settings = dataclasses.replace(mixed_settings, schedule=schedule, distilled=True, probed_length=MIXED_WINDOW)
    params, taught = (loop.initial_state(dataclasses.replace(settings, seed=seed)).params for seed in (0, 5))
    teacher = Teacher(config=settings.model, params=taught)
    figures = student_card.measure(params, settings, teacher, held_out, tokenizer)
    (_, whole), *parts = figures.by_position.items()
    mean = sum((end - begin) * np.array(values) for (begin, end), values in parts) / MIXED_WINDOW
    assert mean == pytest.approx(whole, rel=0.1, abs=0.01)  # padding thins the last positions
    rows = corpus.held_out_rows(held_out, MIXED_WINDOW)
    for nats, one in ((figures.nats, params), (figures.teacher_nats, taught)):
        assert nats == pytest.approx(loop.evaluate(one, settings, rows).sum() / rows.target_mask.sum(), rel=1e-3)
    student_card.write_card(figures, settings, told, held_out, told.folder / "card.md")
    expected = f"loses {figures.nats:.3f} nats per token and the teacher {figures.teacher_nats:.3f}"
    assert expected in (told.folder / "card.md").read_text()
