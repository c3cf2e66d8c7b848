"""A small model beside the model in the engine: turns by entropy, bounds of one request each, refusals in words."""

import json
import shutil

import pytest
from reopened import SIZES, requested

import et_jax
from et_jax import UsageError, preset, replace
from et_jax.models.bundled import bundled_folder
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading import opened as loading
from et_jax.serve.memory import device_memory

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PROMPTS = ["It was late in the evening when", "The guests were these:", "He said that", "On the other hand"]
TURNS = {"name": "bundled", "small": "bundled-small", "max_model_len": 96}


def test_both_speak_and_every_request_has_its_own_bound():
    guarded = et_jax.load(**(SIZES | TURNS), control=preset("ead_guarded", tau=5.0))
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.2, "n": 2}]
    requests = [
        replace(requested(prompt, **{"max_tokens": 24} | kinds[i % 3]), control={"tau": tau})
        for i, (prompt, tau) in enumerate(zip(PROMPTS, (5.0, 5.5, 4.5, 1e9), strict=True))
    ]
    together = guarded.generate(requests)
    shares = [done.to_dict()["entropic"]["small_share"] for done in together]
    assert any(0 < share < 1 for share in shares[:4]) and shares[-1] == 1.0
    said = sum(bool(row.by_small) for done in together for row in done.trace)
    assert 0 < guarded.metrics.small_tokens == said < guarded.metrics.generated_tokens
    assert any("alternates with bundled-small" in line for line in guarded.describe())


def test_a_model_that_does_not_fit_the_other_is_refused(tmp_path):
    folder = shutil.copytree(bundled_folder("bundled-small"), tmp_path / "small")

    def written(name: str, **changed) -> None:
        parts = json.loads((bundled_folder("bundled-small") / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(parts | changed), encoding="utf-8")

    def refused(sentence: str, **settings) -> None:
        with pytest.raises(UsageError, match=sentence):
            et_jax.load(**(SIZES | TURNS | {"small": str(folder), "control": "ead"} | settings))

    written("config.json", vocab_size=4095)
    refused("has a vocabulary of 4095 tokens and the model one of 4096")
    written("config.json", max_position_embeddings=64)
    refused("was made for 64 tokens and max_model_len is 96")
    written("config.json")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (first, one), (second, other) = list(tokenizer["vocab"].items())[300:302]
    written("tokenizer.json", model=tokenizer | {"vocab": tokenizer["vocab"] | {first: other, second: one}})
    for settings in ({}, {"small": None, "draft": str(folder), "control": "off"}):
        refused("small and bundled have different tokenizers; take a small model", **settings)
    refused("nowhere-at-all is neither a folder nor a hub name", small="nowhere-at-all")


def test_a_small_model_that_is_not_small_is_reported():
    said: list[str] = []
    et_jax.load(**SIZES, draft="bundled", progress=said.append)
    assert "bundled, the small model, has no fewer weights than bundled-small: it will save nothing" in said


def test_two_models_that_do_not_fit_in_memory_are_refused_before_a_weight_is_read(monkeypatch):
    one = loading.opened(EngineConfig(**SIZES), lambda _: None).plan
    monkeypatch.setattr(loading, "usable_memory", lambda *_: one.total)
    loading.opened(EngineConfig(**SIZES), lambda _: None)
    monkeypatch.setattr(loading, "load_checkpoint", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=r"This needs .* for weights in bfloat16"):
        loading.opened(EngineConfig(**SIZES, draft="bundled-small"), lambda _: None)
    assert device_memory.usable_memory(0.5) > 0
