"""The model card tells what was measured."""

import json

import pytest
from small_runs import VOCAB

from et_jax.errors import UsageError
from et_jax.training import card, corpus, loop


def test_the_card_tells_what_was_measured(archive, settings, data, tmp_path):
    _, train, held_out = data
    run = tmp_path / "run"
    corpus.prepare(archive, run / "data", VOCAB)
    loop.train(settings, train, held_out, run, steps=4, minutes=None)
    params, step = loop.load_params(run, settings)
    figures = card.measure(params, settings, held_out)
    parts = [(end - begin) * loss for (begin, end), loss in figures.by_position.items()]
    assert sum(parts) / 32 == pytest.approx(figures.per_token[32], rel=0.1)  # padding thins the last positions
    told = card.Run(folder=run, step=step, hardware="a test")
    arguments = (figures, settings, told, held_out, tmp_path / "README.md")
    with pytest.raises(UsageError, match="ngram_baseline"):
        card.write_card(*arguments)
    (run / "ngram.json").write_text(json.dumps({"order": 5, "train_tokens": 9, "per_token": 1.0, "per_byte": 0.5}))
    card.write_card(*arguments)
    text = (tmp_path / "README.md").read_text()
    assert f"{figures.per_token[32]:.3f}" in text
    assert "worse" in text


def test_the_card_tells_of_stages_and_of_what_is_found_again(mixed_settings, mixed_data, tmp_path):
    _, _, held_out = mixed_data
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    for side, name in (("train", "a.txt"), ("held_out", "Kept_1850.txt")):
        (run / "data" / f"{side}.json").write_text(json.dumps({"works": [name], "starts": [0, 9]}))
    (run / "ngram.json").write_text(json.dumps({"order": 5, "train_tokens": 9, "per_token": 4.0, "per_byte": 1.0}))
    minutes = (3.0, 45.0, 2.0, 30.0, 1.0, 15.0)  # of three runs, which begin anew
    (run / "log.jsonl").write_text("".join(json.dumps({"minutes": value}) + "\n" for value in minutes))
    cells = [("passkey", 128, 0.0, 1.0), ("passkey", 128, 1.0, 0.5), ("counting", 256, 0.0, 0.25)]
    names = ("task", "length", "depth", "accuracy")
    rows = [dict(zip(names, cell, strict=True)) | {"examples": 8} for cell in cells]
    (tmp_path / "accuracy.json").write_text(json.dumps({"haystack": "wells.txt", "summary": rows}))
    told = card.Run(
        folder=run, step=8, hardware="a test", history="Begun again twice.", accuracy=tmp_path / "accuracy.json"
    )
    figures = card.Figures(per_token={128: 4.25, 256: 4.125}, by_position={(0, 256): 4.125})
    card.write_card(figures, mixed_settings, told, held_out, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    for part in (
        "128 from step 0, 256 from step 5",
        "25% of them novels",  # all eight steps are below the first share
        "| passkey | 128 | 0.75 | 1.00 | 0.50 |",
        "| counting | 256 | 0.25 | 0.25 |  |",
        "wells.txt",
        "Begun again twice.",
        "--recipe long --from runs/short/model --steps 8 --seed 0",
        "in 1.5 hours on a test",
        "0.125 nats per token worse than the 5-gram",
    ):
        assert part in text
