"""The engine on a real model of 656k weights: what is asked for is what comes."""

import collections
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from exact import log_softmax, surprisal_moments
from places import GOLDEN

from et_jax.models.calibration import Calibration, write_calibration
from et_jax.serve import engine

pytestmark = pytest.mark.usefixtures("hardly_optimised")

ONCE = "Once upon a time"
TOM = "Tom and his dog went to the"


@pytest.fixture(scope="module")
def folder(shared):
    folder = shared / "models/tinystories-656k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


def opened(folder, **settings) -> engine.Model:
    return engine.load(str(folder), compilation_cache=None, **settings)


@pytest.fixture(scope="module")
def model(folder):
    return opened(folder, max_num_seqs=3, prefill_batch=32)


def test_greedy_texts_equal_those_of_transformers(model):
    rows = json.loads((GOLDEN / "tinystories-656k.json").read_text())
    done = model.generate([row["prompt"] for row in rows], temperature=0.0, max_tokens=200)
    for row, completion in zip(rows, done, strict=True):
        assert completion.prompt == row["prompt"] and completion.prompt_tokens == len(row["prompt_ids"])
        assert list(completion.token_ids) == row["ids"]
        assert completion.finish_reason == ("stop" if row["stopped"] else "length")
        assert completion.text.strip() == row["text"].strip()


def test_a_stop_string_or_id_ends_the_text_and_an_end_token_may_be_ignored(model):
    full = model.generate(ONCE, temperature=0.0, max_tokens=40)[0]
    cut = model.generate(ONCE, temperature=0.0, max_tokens=40, stop=("never", "irl nam"))[0]
    assert (cut.text, cut.finish_reason) == (full.text[: full.text.index("irl nam")], "stop")
    stop = full.token_ids[7]
    completion = model.generate(ONCE, temperature=0.0, max_tokens=30, stop_token_ids=(stop,))[0]
    assert completion.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == model.tokenizer.decode(list(completion.token_ids[:-1]))
    rows = json.loads((GOLDEN / "tinystories-656k.json").read_text())
    row = next(row for row in rows if row["stopped"])
    longer = model.generate(row["prompt"], temperature=0.0, max_tokens=len(row["ids"]) + 5, ignore_eos=True)[0]
    assert list(longer.token_ids[: len(row["ids"])]) == row["ids"]
    assert longer.finish_reason == "length" and len(longer.token_ids) == len(row["ids"]) + 5


def test_alternatives_are_the_likeliest_of_the_dense_model_in_order(model):
    completion = model.generate(ONCE, max_tokens=12, logprobs=5, seed=3)[0]
    tokens = model.tokenizer.encode(ONCE)
    logits = dense_logits(model.config, model.params, np.int32([[*tokens, *completion.token_ids]]))
    logprobs = log_softmax(logits[0, len(tokens) - 1 : -1])
    for row, expected in zip(completion.trace, logprobs, strict=True):
        likeliest = np.argsort(-expected, kind="stable")[:5]
        assert [token for token, _ in row.top] == likeliest.tolist()
        np.testing.assert_allclose([logprob for _, logprob in row.top], expected[likeliest], atol=1e-4)
        assert np.exp([logprob for _, logprob in row.top]).sum() <= 1 + 1e-6
        assert row.logprob == pytest.approx(expected[row.token], abs=1e-4)
        assert dict(row.top).get(row.token, row.logprob) == pytest.approx(row.logprob, abs=1e-5)
        assert row.entropy == pytest.approx(-(np.exp(expected) * expected).sum(), abs=1e-4)
    plain = model.generate(ONCE, max_tokens=12, seed=3)[0]
    assert plain.token_ids == completion.token_ids and all(row.top == () for row in plain.trace)


def test_penalties_count_what_was_written(model):
    """Greedy, the token is the argmax of dense logits less what was counted before it."""
    completion = model.generate(TOM, temperature=0.0, max_tokens=40, frequency_penalty=0.7, presence_penalty=0.2)[0]
    tokens = model.tokenizer.encode(TOM)
    logits = np.asarray(dense_logits(model.config, model.params, np.int32([[*tokens, *completion.token_ids]])))
    counts = collections.Counter()
    for i, token in enumerate(completion.token_ids):
        row = logits[0, len(tokens) - 1 + i].astype(np.float64)
        for seen, count in counts.items():
            row[seen] -= 0.7 * count + 0.2
        assert row.argmax() == token
        counts[token] += 1
    barred = model.generate(TOM, temperature=0.0, max_tokens=40, repetition_penalty=1e6)[0]
    assert len({*barred.token_ids, *tokens}) == len(tokens) + 40  # no token of prompt or text comes twice


@pytest.mark.slow
def test_a_calibrated_model_measures_its_entropy_at_that_temperature(folder, model, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    write_calibration(copy, Calibration(temperature=1.5), {})
    scaled = opened(copy, max_num_seqs=3, prefill_batch=32)
    got, plain = (m.generate(ONCE, max_tokens=6, temperature=0.0)[0] for m in (scaled, model))
    assert got.token_ids == plain.token_ids and got.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    tokens = [*model.tokenizer.encode(ONCE), *plain.token_ids]
    logits = dense_logits(model.config, model.params, jnp.asarray([tokens]))[0, -7:-1]
    np.testing.assert_allclose([row.entropy for row in got.trace], surprisal_moments(logits, 1.5)[0], atol=1e-3)
