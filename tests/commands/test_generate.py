"""The command line: what it prints, and how it refuses."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_folder

from et_jax.generate import main
from et_jax.report.trace import VERSION, read_trace

pytestmark = pytest.mark.usefixtures("hardly_optimised")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a byte-level tokenizer, as a Hugging Face folder."""
    return byte_level_folder(tmp_path_factory.mktemp("model"))


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


def test_the_text_comes_as_it_is_produced_or_at_the_end_and_counters_beside_it(folder, tmp_path, capfd, monkeypatch):
    counters, settings = tmp_path / "metrics.txt", ["--model", str(folder), "--max-tokens", "12"]
    prompt, prefix = "It was in the spring", str(tmp_path / "prefix")
    code, out, err = run(capfd, *settings, "-p", prompt, "--no-stream", "--metrics", str(counters))
    assert code == 0
    assert "et_jax_generated_tokens_total 12\n" in counters.read_text()
    assert 'et_jax_requests_finished_total{reason="length"} 1\n' in counters.read_text()
    for part in ("12 tokens", "tokens/s", "first after", "entropic time", "MB moved"):
        assert part in err
    assert run(capfd, *settings, "-p", prompt, "--save-prefix", prefix)[:2] == (0, out)
    (tmp_path / "prompt").write_text(prompt)
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(capfd, *settings, "-p", "-", "--prefix", prefix, "--metrics", str(counters))[:2] == (0, out)
    assert "et_jax_cached_prompt_tokens_total 16\n" in counters.read_text()


@pytest.mark.slow
def test_a_report_of_a_prompt_and_of_a_batch(folder, tmp_path, capfd):
    page, again, counted = tmp_path / "run.html", tmp_path / "same.html", tmp_path / "batch.html"
    settings = ["--model", str(folder), "--max-tokens", "9", "--seed", "3"]
    pruned = ["--control", "certified", "--tolerance", "0.9", "--min-blocks", "1", "--window", "4", "--page-size", "4"]
    pruned += ["--min-context", "0"]
    assert run(capfd, *settings, *pruned, "-p", "It was " * 8, "--report", str(page))[0] == 0
    data = json.loads(page.read_text().split('id="report">')[1].split("</script>")[0])
    assert all(f">{name}</h3>" in page.read_text() for name in ("Temperature", "Blocks read, by layer and KV head"))
    assert {len(top) for top in data["tokens"]["text-1"]["top"]} == {10}  # five alternatives, as word and share
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": "It was " * (i + 1)}) + "\n" for i in range(3)))
    files = ["--input", str(source), "--output", str(output)]
    assert run(capfd, *settings, *files, "--report", str(counted))[0] == 0
    assert "3, 0 with an error" in counted.read_text() and 'class="text"' in counted.read_text()
    assert run(capfd, *settings, *files, "--report", str(again))[0] == 0  # all is done: the rows alone
    assert "3, 0 with an error" in again.read_text() and 'class="text"' not in again.read_text()


def test_trace_json_and_plot_agree(folder, tmp_path, capfd):
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "picture.png"
    settings = ["--model", str(folder), "-p", "It was", "--max-tokens", "9", "--seed", "3", "--n", "3", "--json"]
    code, out, _ = run(capfd, *settings, "--trace", str(trace), "--plot", str(plot))
    completions = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [one["index"] for one in completions] == [0, 1, 2]
    assert len({one["text"] for one in completions}) == 3
    about, traced = read_trace(trace)
    assert [one.to_dict() for one in traced] == completions
    header, *lines = [json.loads(line) for line in trace.read_text().splitlines()]
    told = {"prompt": "It was", "prompt_tokens": 6, "min_context": None}
    assert header == {"trace": VERSION, "model": str(folder), "control": "off", "n": 3} | told
    assert (about.prompt, about.prompt_tokens) == ("It was", 6)
    for number, one in enumerate(completions):
        *rows, end = [line for line in lines if line["index"] == number]
        assert end["end"]["finish_reason"] == one["finish_reason"]
        assert [row["token"] for row in rows] == one["token_ids"]
        assert "".join(row["text"] for row in rows) == one["text"]
        assert one["usage"] == {"prompt_tokens": 6, "completion_tokens": len(rows)}
        assert sum(row["cost"] for row in rows) == pytest.approx(one["entropic"]["cost_bytes"])
        falls = [max(0.0, before["entropy"] - after["entropy"]) for before, after in itertools.pairwise(rows)]
        assert rows[-1]["entropic_time"] == one["entropic"]["entropic_time"] == pytest.approx(sum(falls), rel=1e-5)
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--system-prompt", "Be kind."], "--system-prompt needs --chat"),
        (["--chat"], "no chat template"),
        (["--num-pages", "2", "--max-tokens", "30"], "the cache has 1"),
        (["--plot", "picture.txt"], "draws .png"),
        (["--prefix", "absent"], "absent is no file"),
        (["--lora", "absent"], "The adapter absent is no folder"),
        (["--model", "no/such-model"], "no/such-model"),
    ],
)
def test_refuses_in_one_sentence(folder, capfd, monkeypatch, arguments, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run(capfd, "--model", str(folder), "-p", "It was", *arguments)
    complaint = err.splitlines()[-1]
    assert code == 2 and out == "" and "Traceback" not in err
    assert complaint.startswith("error: ") and words in complaint


@pytest.mark.parametrize(("flags", "num_tokens"), [([], 7), (["--allow-special-tokens"], 3)])
def test_a_message_ends_itself_only_where_it_may(folder, tmp_path, capfd, flags, num_tokens):
    place = shutil.copytree(folder, tmp_path / "chat")
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    said = ["--model", str(place), "-p", "a<end>b", "--chat", "--max-tokens", "1", "--json", *flags]
    code, out, _ = run(capfd, *said)
    assert code == 0
    assert json.loads(out)["usage"]["prompt_tokens"] == num_tokens


def test_a_check_reads_config_json_alone(folder, tmp_path, capfd):
    """What a model needs."""
    config, values = tmp_path / "config.json", json.loads((folder / "config.json").read_text())

    def check(values: dict[str, Any], *more: str) -> tuple[int, str, str]:
        config.write_text(json.dumps(values))
        return run(capfd, "--model", str(tmp_path), "--check", *more)

    code, out, err = check(values, "--dtype", "bfloat16", "--max-num-seqs", "4")
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0].startswith(f"{tmp_path} runs here: llama, ")
    assert lines[1] == "weights in bfloat16, cache in bfloat16"
    assert any(line.startswith("device cpu, attention by xla") for line in lines)
    assert any(line.startswith("4 sequences of ") for line in lines) and lines[-2].endswith("that may be used")
    assert lines[-1].startswith("chips that fit it (--tensor-parallel): TPU v5e 1 (")
    for flags, measures in (["off"], 0), (["adaptive"], 1), (["adaptive", "--calibration", "none"], 0):
        out = check(values, "--min-context", "0", "--control", *flags)[1]
        assert out.count("loading measures it once") == measures
