"""lm-evaluation-harness asks et_jax as it asks others, and finds what et_jax finds itself."""

import json
import math
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from et_jax.harness import Harness
from et_jax.tasks.asking import counter, evaluate, grid


@pytest.fixture(scope="module")
def harness():
    return Harness("bundled", dtype="float32")


def asked(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]


def test_a_task_of_ours_gives_the_figures_of_evaluate(harness, tmp_path):
    examples = grid(counter(harness.model), ["passkey", "single_key"], [256], depths=4, samples=2)
    examples += [(256, one) for _, one in grid(counter(harness.model), ["tracing"], [256], depths=4, samples=2)]
    rows = [json.dumps({"prompt": one.prompt, "answer": one.answer.strip()}) for _, one in examples]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    task = {
        "task": "found",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24},
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "found.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    run: Any = simple_evaluate
    found = run(model=harness, tasks=["found"], task_manager=manager, bootstrap_iters=0)
    short = [(length, one) for length, one in examples if one.task != "tracing"]
    right = sum(one.right for one in evaluate(harness.model, short))
    share = found["results"]["found"]["exact_match,stripped"]
    assert 0 < right <= round(share * len(examples)) < len(examples)


def test_continuations_have_the_log_probability_of_the_text(harness):
    context = " ".join(["It was a bright cold day."] * 20)
    pairs = [(context, " The sea."), (context, " He went on"), ("", "It was"), ("The rain", " fell")]
    *found, beyond = harness.loglikelihood(asked("loglikelihood", *pairs, (context * 9, " x")), disable_tqdm=True)
    model = harness.model
    for (before, rest), (total, greedy) in zip(pairs, found, strict=True):
        [score] = model.score(before + rest)
        count = len(model.tokenizer.encode(before + rest)) - len(model.tokenizer.encode(before))
        assert total == pytest.approx(score.log_probs[-count:].sum(), abs=1e-4)
        assert greedy == bool(score.greedy[-count:].all())
    assert math.isfinite(beyond[0])  # of a context longer than the model's: its last tokens


def test_a_long_text_is_read_in_windows_each_token_once(harness):
    text = "The rain fell on the hill, and the sea lay still. " * 250
    [total] = harness.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)
    ids = harness.model.tokenizer.encode(text)
    size = harness.model.max_model_len - 1
    assert len(ids) > size + 2
    first = harness.model.score([tuple(ids[: size + 1])])[0].log_prob
    rest = harness.model.score([tuple(ids[len(ids) - size - 1 :])])[0].log_probs[-(len(ids) - size - 1) :].sum()
    assert total == pytest.approx(first + rest, rel=1e-4)


def test_answers_stop_and_are_greedy_unless_asked(harness):
    prompts = [("It was", {"until": ["."], "max_gen_toks": 40}), ("It was", {"do_sample": True, "temperature": 5.0})]
    first, second = harness.generate_until(asked("generate_until", *prompts), disable_tqdm=True)
    [expected] = harness.model.generate("It was", temperature=0.0, max_tokens=40)
    assert expected.text.startswith(first) and "." not in first and not np.array_equal(first, second)
