"""Every family equals transformers, by files that scripts/make_golden.py wrote."""

import json

import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN, SHARED

from et_jax.models.checkpoint import load, read_config
from et_jax.models.families.registry import config_to_hugging_face, from_hugging_face

FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def test_all_families_are_here():
    assert len(FAMILIES) == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    config, params = load(GOLDEN / family)
    golden = np.load(GOLDEN / family / "golden.npz")
    assert golden["logits"].std() > 1
    np.testing.assert_allclose(dense_logits(config, params, golden["tokens"]), golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_survives_its_own_config_json(family):
    config = read_config(GOLDEN / family)
    assert from_hugging_face(config_to_hugging_face(config)) == config


def test_greedy_texts_of_a_real_model_equal_those_of_transformers():
    folder = SHARED / "models/tinystories-656k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; set ET_JAX_SHARED to the folder of shared models")
    config, params = load(folder)
    rows = json.loads((GOLDEN / "tinystories-656k.json").read_text())
    texts = [row["prompt_ids"] + row["ids"] for row in rows]
    tokens = np.zeros((len(rows), max(map(len, texts))), np.int32)
    for line, text in zip(tokens, texts, strict=True):
        line[: len(text)] = text
    greedy = np.asarray(dense_logits(config, params, tokens).argmax(-1))
    for row, text, winners in zip(rows, texts, greedy, strict=True):
        assert winners[len(row["prompt_ids"]) - 1 : len(text) - 1].tolist() == row["ids"]
        assert (row["ids"][-1] in config.eos_token_ids) == row["stopped"]
