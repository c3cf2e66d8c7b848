"""The command line for tasks: what counts as right, what is written, and how it refuses."""

import errno
import json
import math
import os
import signal
import time
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
from plain_sequences import row

from et_jax import evaluate
from et_jax.cli import command, signals
from et_jax.cli.streams import STANDARD_OUTPUT
from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.completions import Completion, PromptRead
from et_jax.tasks import answers as told_of
from et_jax.tasks import asking, files
from et_jax.tasks.base import Example, right
from et_jax.tasks.scored import texts_of

pytestmark = pytest.mark.usefixtures("hardly_optimised")


class Reader:
    """Stands for a model: knows answers by their prompts, counts letters as tokens, notes what it was asked."""

    def __init__(self, known):
        self.known, self.calls, self.max_model_len = known, [], 2048
        self.prompt_read: PromptRead | None = None
        self.tokenizer = SimpleNamespace(encode=lambda text: [0, *text.encode()])

    def generate(self, prompts, **settings):
        self.calls.append((list(prompts), settings))
        figures = {"blocks_held": 8, "audited": 2, "by_small": False}
        trace = [row(1, blocks_read=n, agreed=n // 2 - 1, share_bytes=n / 8 + 0.1, **figures) for n in (6, 2)]
        told = {"prompt_read": self.prompt_read, "prompt_tokens": 119, "tokens_left_out": 90, "trace": tuple(trace)}
        told |= {"index": 0, "token_ids": (1, 1), "finish_reason": "length"}
        return [Completion(prompt=one, text=self.known.get(one, " no idea"), **told) for one in prompts]


@pytest.fixture
def asked():
    count = asking.counter(Reader({}))
    return asking.grid(count, ["single_key", "passkey"], [200, 400], depths=3, samples=2)


def test_a_grid_has_every_task_length_and_depth_and_no_example_twice(asked):
    found = Counter((one.task, length, one.depth) for length, one in asked)
    assert found == dict.fromkeys(product(("single_key", "passkey"), (200, 400), (0.0, 0.5, 1.0)), 2)
    assert all(one.length <= length for length, one in asked)
    assert len({one.prompt for _, one in asked}) == len(asked)
    assert len({one.answer for length, one in asked if one.task == "passkey" and length == 200}) == 6
    again = asking.grid(asking.counter(Reader({})), ["single_key"], [200], depths=3, samples=2, seed=1)
    assert not {one.prompt for _, one in again} & {one.prompt for _, one in asked}


def test_answers_are_counted_and_shares_read_are_those_of_the_trace(asked):
    known = {one.prompt: one.answer + "." for _, one in asked if one.task == "passkey" and one.depth == 0.5}
    answers = asking.evaluate(Reader(known), asked, control="guarded")
    assert [answer.example for answer in answers] == [one for _, one in asked]
    assert all(answer.right == (answer.example.prompt in known) for answer in answers)
    assert {answer.share_read for answer in answers} == {0.5} and {answer.share_by_model for answer in answers} == {1.0}
    assert [answer.share_bytes for answer in answers] == pytest.approx([0.6] * len(answers))
    summary = [(one["task"], one["depth"], one["accuracy"], one["examples"]) for one in told_of.summary(answers)]
    depths = product(("single_key", "passkey"), (200, 400), (0.0, 0.5, 1.0))
    assert summary == [(task, depth, float(task == "passkey" and depth == 0.5), 2) for task, _, depth in depths]
    [line] = [line for line in told_of.table(answers).splitlines() if line.startswith("passkey") and " 400" in line]
    assert line.split()[1:5] == ["400", "2/6", "0.333", "50%"] and line.endswith("0.00: 0.00  0.50: 1.00  1.00: 0.00")


def test_a_model_is_asked_greedily_for_one_token_more_than_the_answer_has(asked):
    reader = Reader({})
    asking.evaluate(reader, asked)
    for prompts, settings in reader.calls:
        sizes = {len(one.answer) + 1 for _, one in asked if one.prompt in prompts}
        assert sizes == {settings["max_tokens"]}
        assert settings["temperature"] == 0.0 and settings["control"] is None
    assert sum(len(prompts) for prompts, _ in reader.calls) == len(asked)
    number = Example(task="gsm8k", prompt="How many?", answer="12", depth=0.0, length=3, match="number")
    reader = Reader({"How many?": "5 and 7 make 12."})
    [answer] = asking.evaluate(reader, [(3, number)])
    assert answer.right and reader.calls[0][1]["max_tokens"] > 100  # it may come after many words


def test_the_command_line_writes_answers_and_a_picture(tmp_path):
    arguments = ["--task", "passkey", "--length", "96", "--depths", "2", "--samples", "1", "--batch", "2"]
    assert evaluate.main([*arguments, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert [row["depth"] for row in report["summary"]] == [0.0, 1.0]
    assert len(report["answers"]) == 2
    for answer in report["answers"]:
        assert answer["right"] == answer["text"].startswith(answer["example"]["answer"])
        assert answer["share_read"] == 1.0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_texts_are_scored_in_windows_each_token_once(tmp_path):
    texts = ["It was the sea.", "It", " ".join(["The rain fell on the hill."] * 9)]
    given, kept, picture = (tmp_path / name for name in ("in.jsonl", "out.json", "out.png"))
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--model", "bundled-small", "--task", "score", "--input", str(given), "--length", "16"]
    assert evaluate.main([*arguments, "--json", str(kept), "--plot", str(picture)]) == 0
    found = json.loads(kept.read_text())["texts"]
    model = engine.load("bundled-small")
    for text, one in zip(texts, found, strict=True):
        ids = model.tokenizer.encode(text)
        assert one["token_ids"] == ids[1:] and one["tokens"] == len(one["log_probs"]) == len(one["entropy"])
        assert one["bits_per_byte"] == pytest.approx(-sum(one["log_probs"]) / math.log(2) / len(text))
    [whole] = model.score(texts[2])
    assert found[2]["log_probs"][:15] == pytest.approx(whole.log_probs[1:16].tolist(), abs=2e-3)
    assert found[2]["log_probs"][20:30] != pytest.approx(whole.log_probs[21:31].tolist(), abs=1e-2)  # of less context
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ['{"text": 5}', "{", '{"prompt": "x"}', '{"text": ""}'])
def test_a_line_without_a_text_is_named(text, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "It was"}\n\n' + text)
    with pytest.raises(UsageError, match=r"Line 3 of .* has no text"):
        texts_of(path)


TWO = ("--task", "passkey", "--length", "400", "--depths", "2", "--samples", "1")


def test_a_signal_after_the_last_answer_loses_none(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(engine, "load", lambda *_, **__: Reader({}))
    monkeypatch.setattr(signals, "_end", lambda *_: pytest.fail("it ended before the files were written"))
    about = evaluate._about

    def interrupted(args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # another thread listens
        return about(args)

    monkeypatch.setattr(evaluate, "_about", interrupted)
    code = evaluate.main([*TWO, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert code == 128 + signal.SIGINT
    assert len(json.loads((tmp_path / "a.json").read_text())["answers"]) == 2
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "0/2" in capfd.readouterr().out


def test_a_reader_that_has_gone_loses_no_answer(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(engine, "load", lambda *_, **__: Reader({}))

    def gone(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", STANDARD_OUTPUT)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "table", gone)
        assert evaluate.main([*TWO, "--json", str(tmp_path / "a.json")]) == command.READER_GONE
    assert len(json.loads((tmp_path / "a.json").read_text())["answers"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_write", gone)
        assert evaluate.main([*TWO, "--json", "-", "--plot", str(tmp_path / "a.png")]) == command.READER_GONE
    assert (tmp_path / "a.png").exists() and "error" not in capfd.readouterr().err


TOO_LONG = "--length is 1000000; bundled has room for 2048 tokens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "gsm8k"], "name the file with --prompts"),
        (["--prompts", "x.jsonl"], "belongs to one task"),
        (["--depths", "0"], "--depths is 0; it must be at least 1"),
        (["--length", "96", "--length", "1000000"], TOO_LONG),
        (["--samples=100000", "--task=passkey", "--depths=2"], "make 200000 prompts and at most 100000 are asked"),
        (["--task", "loss", "--haystack", __file__, "--length", "1000000"], TOO_LONG),
        (["--task", "passkey", "--length", "20"], "too short for this task"),
        (["--haystack", "absent.txt"], "absent.txt cannot be read"),
        (["--haystack", "/dev/null"], "/dev/null is empty"),
        (["--haystack", "/dev/zero"], "/dev/zero holds more than 256 MiB"),
        (["--model", "\udcff"], "cannot spell; choose another name"),
        (["--task", "loss"], "with a text named by --haystack"),
        (["--task", "score"], "--input FILE and --task score belong together"),
        (["--task", "score", "--input", __file__, "--control", "paper"], "with dense attention; leave --haystack"),
        (["--task", "score", "--input", "absent.txt"], "absent.txt cannot be read"),
        (["--chat", "--task", "passkey"], "bundled has no chat template"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, message, capfd):
    assert evaluate.main(arguments) == command.USAGE
    err = capfd.readouterr().err.splitlines()
    assert message in err[-1]
    assert err[-1].startswith("error: ")


# What a record of each task makes, and an answer that counts as right.
RECORDS = {
    "longeval_lines": (
        {"random_idx": ["a-b", 2], "expected_number": 24, "num_lines": 5, "prompt": "line a-b: <24>"},
        ("line a-b: <24>", "24", 0.5, "It is <24>."),
    ),
    "longeval_topics": (
        {"prompt": "first?", "topics": ["The sea", "The sky"]},
        ("first?", "The sea", 0.0, "We spoke of the sea."),
    ),
    "lost_in_the_middle": (
        {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k3", "value": "v3"},
        ('Find the value of a key in this JSON object.\n\n{"k1": "v1",\n "k2": "v2",\n "k3": "v3"}\n\n'
         'Key: "k3"\nValue:', "v3", 1.0, ' "v3"'),
    ),
    "gsm8k": (
        {"question": "How much?", "answer": "2 * 600 = 1200\n#### 1,200"},
        ("Question: How much?\nAnswer:", "1200", 0.0, "It makes $1,200."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", RECORDS)
def test_published_tasks_are_read(task, tmp_path):
    record, (prompt, answer, depth, said) = RECORDS[task]
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    [one] = files.examples(task, tmp_path / "a.jsonl", len, 1)
    assert (one.prompt, one.answer, one.depth) == (prompt, answer, depth)
    assert one.length == 1 + len(prompt) + len(answer)
    assert right(one, said) and not right(one, "It is 7.")
