"""The command line: what it prints, and how it refuses."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tokenizers
from places import GOLDEN
from safetensors.numpy import load_file, save_file

from et_jax.errors import UsageError
from et_jax.generate import main
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.transformer import initialise
from et_jax.report.trace import VERSION, read_trace
from scripts.measuring.shapes import SMALL

pytestmark = pytest.mark.usefixtures("hardly_optimised")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a byte-level tokenizer, as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<end>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    byte_level.train_from_iterator([], trainer)
    config = dataclasses.replace(SMALL, vocab_size=byte_level.get_vocab_size(), eos_token_ids=(0,))
    write_hugging_face(path, config, initialise(config, jax.random.key(0)))
    byte_level.save(str(path / "tokenizer.json"))
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_streams_text_and_sums_up(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "--model", str(folder), "-p", "It was", "--max-tokens", "12", "--no-stream")
    assert code == 0
    counters = tmp_path / "metrics.txt"
    streamed = run(capfd, "--model", str(folder), "-p", "It was", "--max-tokens", "12", "--metrics", str(counters))
    assert streamed[1] == out
    assert "et_jax_generated_tokens_total 12\n" in counters.read_text()
    assert 'et_jax_requests_finished_total{reason="length"} 1\n' in counters.read_text()
    for part in ("12 tokens", "tokens/s", "first after", "entropic time", "MB moved"):
        assert part in err


@pytest.mark.slow
def test_a_report_of_a_prompt_and_of_a_batch(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("absent/run.html", "cannot be written (No such file or directory); choose another file."),
        ("run.pdf", "should end in .html."),
        ("in.html", "is the same file as --input"),
    ],
)
def test_a_report_that_cannot_be_kept_is_refused_first(
    path: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, source = tmp_path / path, tmp_path / "in.html"
    source.write_text('{"prompt": "a"}\n')
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    code, out, err = run(capfd, *files, "--report", str(place))
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_report_of_no_answers_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, page = tmp_path / "in.jsonl", tmp_path / "batch.html"
    source.write_text("")
    code, _, err = run(capfd, "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--report", str(page))
    assert code == 1 and "holds no row, so there is nothing to report" in err and not page.exists()


def test_trace_and_json_agree(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "picture.png"
    settings = ["--model", str(folder), "-p", "It was", "--max-tokens", "9", "--seed", "3"]
    code, out, _ = run(capfd, *settings, "--json", "--trace", str(trace), "--plot", str(plot))
    assert code == 0
    completion = json.loads(out)
    header, *rows, end = [json.loads(line) for line in trace.read_text().splitlines()]
    about, [again] = read_trace(trace)
    assert again.to_dict() == completion and end["end"]["finish_reason"] == completion["finish_reason"]
    assert header == {"trace": VERSION, "model": str(folder), "control": "off", "n": 1} | {
        "prompt": about.prompt,
        "prompt_tokens": about.prompt_tokens,
        "min_context": None,
    }
    assert (about.prompt, about.prompt_tokens) == ("It was", 6)
    assert [row["token"] for row in rows] == completion["token_ids"]
    assert "".join(row["text"] for row in rows) == completion["text"]
    assert completion["usage"] == {"prompt_tokens": 6, "completion_tokens": len(rows)}
    assert sum(row["cost"] for row in rows) == pytest.approx(completion["entropic"]["cost_bytes"])
    assert rows[-1]["entropic_time"] == completion["entropic"]["entropic_time"]
    falls = [max(0.0, before["entropy"] - after["entropy"]) for before, after in itertools.pairwise(rows)]
    assert rows[-1]["entropic_time"] == pytest.approx(sum(falls), rel=1e-5)
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


@pytest.mark.slow
def test_control_by_name_and_by_knob_is_reported(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a model that is sure of itself, so that a tolerance is spent."""
    sure = copy(folder, tmp_path / "sure")
    tensors = load_file(sure / "model.safetensors")
    save_file(tensors | {"model.norm.weight": 40 * tensors["model.norm.weight"]}, sure / "model.safetensors")
    settings = [
        "--model",
        str(sure),
        "-p",
        "It was a dark and stormy night.",
        "--max-tokens",
        "30",
        "--page-size",
        "4",
    ]
    off = run(capfd, *settings, "--json")
    knobs = ["--tolerance", "5", "--min-blocks", "1", "--window", "4", "--target-entropy", "1", "--min-context", "0"]
    guarded = run(capfd, *settings, "--json", "--control", "guarded", *knobs)
    assert off[0] == guarded[0] == 0
    before, after = (json.loads(out)["entropic"] for _, out, _ in (off, guarded))
    assert before["share_read"] == 1 and before["guard_rates"] == {}
    assert after["share_read"] < 1 and 0 < after["least_mass_kept"] < 1
    assert set(after["guard_rates"]) == {"stability", "temperature_saturation"}
    assert after["temperature_range"][0] < after["temperature_range"][1] == 1
    assert after["nats_per_byte"] == pytest.approx(after["entropic_time"] / after["cost_bytes"])
    for part in ("% of blocks, ", "% of bytes, kept at least", "temperature_saturation", "stability"):
        assert part in guarded[2] and part not in off[2]


def test_several_continuations_differ(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--model", str(folder), "-p", "It was", "--max-tokens", "8", "--n", "3", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert len({line["text"] for line in lines}) == 3


def test_reads_standard_input(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("It was")
    with prompt.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        piped = run(capfd, "--model", str(folder), "-p", "-", "--max-tokens", "8")
    assert piped[:2] == run(capfd, "--model", str(folder), "-p", "It was", "--max-tokens", "8")[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it must be 0 (greedy) or above"),
        (["--temperature", "nan"], "temperature is nan; it must be a finite number"),
        (["--top-p", "0"], "top_p is 0.0; it must be above 0"),
        (["--top-p", "1.5"], "top_p is 1.5; it must be above 0"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--n", "0"], "n is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], 'stop holds ""'),
        (["--system-prompt", "Be kind."], "--system-prompt needs --chat"),
        (["--chat"], "no chat template"),
        (["--control", "entropic"], 'control is "entropic"; choose one of off, paper, guarded, certified, adaptive'),
        (["--target-entropy", "2"], 'control "off" has no target_entropy'),
        (["--control", "certified", "--tolerance", "2"], "tolerance is 2.0; it must be a share of attention, from 0"),
        (["--max-model-len", "4096"], "made for 64 tokens"),
        (["--num-pages", "2", "--max-tokens", "30"], "the pool holds 1"),
        (["--num-pages", "0"], "num_pages is 0"),
        (["--page-size", "0"], "page_size is 0; it must be at least 1"),
        (["-p", "x" * 64], "The prompt has 64 tokens"),
        (["-p", ""], "The prompt is empty"),
        (["--trace", "/proc/nowhere/trace"], "cannot be written"),
        (["--plot", "picture.txt"], "draws .png"),
    ],
)
def test_refuses_in_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capfd, "--model", str(folder), "-p", "It was", *arguments)
    complaint = err.splitlines()[-1]
    assert code != 0 and out == ""
    assert complaint.startswith("error: ") and words in complaint
    assert "Traceback" not in err


def damaged(folder: Path, kind: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    match kind:
        case "unknown architecture":  # with no weight to read: it must be refused before
            config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["FooForCausalLM"]}))
            weights.unlink()
        case "missing weights":
            weights.unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "wrong shape":
            tensors = load_file(weights)
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
            save_file(tensors, weights)
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "not numbers":
            tensors = load_file(weights)
            tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
            save_file(tensors, weights)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown architecture", "FooForCausalLM is not supported"),
        ("missing weights", "safetensors"),
        ("truncated weights", "model.safetensors"),
        ("wrong shape", "model.norm.weight"),
        ("no tokenizer", "tokenizer"),
        ("not numbers", "are not numbers"),
    ],
)
def test_refuses_a_damaged_model(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    broken = copy(folder, tmp_path / "broken")
    damaged(broken, kind)
    code, _, err = run(capfd, "--model", str(broken), "-p", "It was", "--max-tokens", "4")
    complaint = err.splitlines()[-1]
    assert code != 0 and complaint.startswith("error: ") and words in complaint and "Traceback" not in err


def test_refuses_a_model_that_is_nowhere(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("no/such-model", "nowhere"):
        code, _, err = run(capfd, "--model", name, "-p", "It was")
        assert code != 0 and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err


def test_a_full_disk_ends_in_one_sentence(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full to write to")
    code, _, err = run(capfd, "--model", str(folder), "-p", "It was", "--max-tokens", "4", "--trace", str(full))
    assert code != 0 and "No space left" in err.splitlines()[-1] and "Traceback" not in err


def test_an_interrupt_keeps_the_text(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C after the first tokens: what was streamed stays, the summary is printed, the exit code says so."""
    trace = tmp_path / "trace.jsonl"
    command = [sys.executable, "-c", SLOWLY, "--model", str(folder), "-p", "It was", "--max-tokens", "50"]
    process = subprocess.Popen(
        [*command, "--trace", str(trace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    deadline = time.monotonic() + 120
    while not (trace.exists() and len(trace.read_text().splitlines()) >= 4) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = (stream.decode() for stream in process.communicate(timeout=60))  # bytes: a \\r is text here
    _, [completion] = read_trace(trace)
    assert process.returncode == 130
    assert 3 <= len(completion.trace) < 50 and completion.finish_reason == "abort"
    assert out == completion.text + "\n"
    assert "(abort)" in err and "Traceback" not in err


SLOWLY = """
import sys, time
from et_jax import generate
from et_jax.report import display
take = display.Report.take
display.Report.take = lambda *a: (time.sleep(0.1), take(*a))[1]
sys.exit(generate.main(sys.argv[1:]))
"""


def test_help_needs_no_jax() -> None:
    """Help and mistakes in the arguments answer at once: nothing heavy is imported before they are read."""
    code = "import sys; from et_jax import generate; generate.parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_special_tokens_are_allowed_in_a_conversation_only(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "--model", str(folder), "-p", "It was", "--allow-special-tokens")
    assert (code, out) == (2, "") and "--allow-special-tokens needs --chat" in err


@pytest.mark.parametrize(("flags", "num_tokens"), [([], 7), (["--allow-special-tokens"], 3)])
def test_a_message_ends_itself_only_where_it_may(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], num_tokens: int
) -> None:
    place = copy(folder, tmp_path / "chat")
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    said = ["--model", str(place), "-p", "a<end>b", "--chat", "--max-tokens", "1", "--json", *flags]
    code, out, _ = run(capfd, *said)
    assert code == 0
    assert json.loads(out)["usage"]["prompt_tokens"] == num_tokens


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(UsageError, ValueError)


def test_a_check_tells_from_config_json_alone_what_a_model_needs(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "no-weights"
    config.mkdir()
    shutil.copy(folder / "config.json", config)
    code, out, err = run(capfd, "--model", str(config), "--check", "--dtype", "bfloat16", "--max-num-seqs", "4")
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0].startswith(f"{config} runs here: llama, ") and lines[1] == "weights in bfloat16, cache in bfloat16"
    assert any(line.startswith("device cpu, attention by xla") for line in lines)
    assert any(line.startswith("4 sequences of ") for line in lines) and lines[-1].endswith("that may be used")


def test_a_check_knows_experts_of_4_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(GOLDEN / "gpt_oss_mxfp4" / "config.json", tmp_path)
    code, out, err = run(capfd, "--model", str(tmp_path), "--check", "--page-size", "16")
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0].endswith("3 layers, 2 of them with a window of 8 tokens")
    assert (
        lines[0].startswith(f"{tmp_path} runs here: gpt_oss, ") and lines[1] == "weights in bfloat16, cache in bfloat16"
    )


def test_a_check_says_what_to_change(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "no-weights"
    config.mkdir()
    values = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2**28}
    (config / "config.json").write_text(json.dumps(values))
    code, out, err = run(capfd, "--model", str(config), "--check", "--max-num-seqs", "64")
    assert code == 2 and not out and "take max_model_len" in err and err.count("\n") == 1
    (config / "config.json").write_text(json.dumps(values | {"architectures": ["Qwen3NextForCausalLM"]}))
    code, out, err = run(capfd, "--model", str(config), "--check")
    assert code == 2 and "linear attention" in err
