"""Traces: what is written is read back equal, a run cut off anywhere up to there, and every other file is refused."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from et_jax.cli.streams import open_text
from et_jax.errors import UsageError
from et_jax.report.trace import VERSION, About, TraceWriter, read_trace
from et_jax.serve.completions import Completion, PromptRead, TokenEvent, TokenTrace, Unreturned

ABOUT = About(model="bundled", control="certified", n=2, prompt='It\nwas\u2028 "É"', prompt_tokens=3, min_context=4096)

figures, counts = st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**40)
NUMBERS = ("entropy", "varentropy", "temperature", "surprisal", "kept_mass", "entropic_time", "cost", "flops")
COUNTS = ("token", "blocks_read", "blocks_held", "drafted", "audited", "agreed")
rows = st.fixed_dictionaries(
    dict.fromkeys(NUMBERS, figures)
    | dict.fromkeys(COUNTS, counts)
    | dict.fromkeys(("attention_entropy", "least_attention_entropy"), st.none() | figures)
    | {
        "text": st.text(max_size=4),
        "guard_rates": st.dictionaries(st.text(max_size=4), figures, max_size=2),
        "accepted": st.booleans(),
        "by_small": st.none() | st.booleans(),
        "top": st.lists(st.tuples(counts, figures), max_size=2).map(tuple),
        "reads": st.none() | st.lists(st.tuples(counts, counts), max_size=2).map(tuple),
    }
)
prompts_read = st.fixed_dictionaries({"blocks_read": figures, "blocks_held": figures, "mass_kept": st.none() | figures})
ends = st.fixed_dictionaries(
    {
        "finish_reason": st.sampled_from(["stop", "length", "abort", "error"]),
        "error": st.none() | st.text(max_size=9),
        "prompt_read": st.none() | prompts_read,
        "tokens_left_out": counts,
        "unreturned": st.none() | st.builds(Unreturned, cost=figures, flops=figures),
    }
)
held_back = st.none() | st.text(max_size=3)


def completed(index: int, trace: list[TokenTrace], **ended) -> Completion:
    return Completion(
        prompt=ABOUT.prompt,
        prompt_tokens=ABOUT.prompt_tokens,
        index=index,
        text="".join(row.text for row in trace),
        token_ids=tuple(row.token for row in trace),
        trace=tuple(trace),
        min_context=ABOUT.min_context,
        **{"finish_reason": "length"} | ended,
    )


def token(index: int, row: TokenTrace, completion: Completion | None = None) -> TokenEvent:
    return TokenEvent(prompt_index=0, index=index, text=row.text, trace=row, completion=completion)


def end(index: int, completion: Completion, text: str = "") -> TokenEvent:
    return TokenEvent(prompt_index=0, index=index, text=text, trace=None, completion=completion)


def played(index: int, drawn: list[dict], held: str | None, ended: dict) -> tuple[list[TokenEvent], Completion]:
    """The events of a continuation that ends with its last token, or later with the text that was `held` back."""
    trace = [TokenTrace(**values) for values in drawn]
    read = ended["prompt_read"]
    ended = ended | {"prompt_read": None if read is None else PromptRead(**read)}
    if trace and held is None:
        done = completed(index, trace, **ended)
        return [*(token(index, row) for row in trace[:-1]), token(index, trace[-1], done)], done
    held = (held or "") * bool(trace)
    whole = [*trace[:-1], *(dataclasses.replace(row, text=row.text + held) for row in trace[-1:])]
    done = completed(index, whole, **ended)
    return [*(token(index, row) for row in trace), end(index, done, held)], done


def written(path: Path, events: list[TokenEvent], about: About = ABOUT) -> Path:
    with open_text(str(path)) as stream:
        writer = TraceWriter(stream, about)
        for event in events:
            writer.take(event)
        writer.check()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.jsonl"


@given(st.lists(st.tuples(st.lists(rows, max_size=4), held_back, ends), min_size=ABOUT.n, max_size=ABOUT.n))
def test_what_is_written_is_read_back_equal(file, drawn):
    events, done = zip(*(played(index, *one) for index, one in enumerate(drawn)), strict=True)
    mixed = [event for pair in itertools.zip_longest(*events) for event in pair if event is not None]
    assert read_trace(written(file, mixed)) == (ABOUT, list(done))


def plain(number: int, text: str = " é") -> TokenTrace:
    return TokenTrace(token=number, text=text, blocks_read=1, blocks_held=1, **dict.fromkeys(NUMBERS, 0.5))


def test_a_run_that_was_cut_off_anywhere_is_read_up_to_there(file):
    one, other = [plain(1), plain(2)], [plain(3), plain(4), plain(5)]
    done = [completed(0, one), completed(1, other)]
    events = [token(0, one[0]), token(1, other[0]), token(0, one[1], done[0]), token(1, other[1]), token(1, other[2])]
    data = written(file, [*events, end(1, done[1])]).read_bytes()
    of_lines = [(0, 1), (1, 1), (0, 1), (0, None), (1, 1), (1, 1), (1, None)]  # the tokens of whom, None for an end
    header, *lengths = itertools.accumulate(len(line) + 1 for line in data.splitlines())
    near = {after + more for after in (header, *lengths) for more in (-2, -1, 0, 1)} | set(range(0, len(data), 41))
    for size in near - {len(data) + 1}:
        file.write_bytes(data[:size])
        if size < header - 1:  # a line is there with its last brace
            with pytest.raises(UsageError, match=r"is empty or has no complete line; write it again with --trace\.$"):
                read_trace(file)
            continue
        there = [line for line, after in zip(of_lines, lengths, strict=True) if size >= after - 1]
        expected = [
            kept
            if (index, None) in there
            else completed(index, list(kept.trace[: there.count((index, 1))]), finish_reason="abort")
            for index, kept in enumerate(done)
        ]
        assert read_trace(file) == (ABOUT, expected)


def test_a_token_that_was_never_handed_on_is_in_the_trace(file):
    """One whose sequence failed after it was sampled is in the completion alone."""
    failed = completed(1, [plain(1), plain(2)], finish_reason="error", error="The tokenizer failed.")
    ended = completed(0, [])
    assert read_trace(written(file, [token(1, plain(1)), end(0, ended), end(1, failed)]))[1] == [ended, failed]


HEADER = {"trace": VERSION} | dataclasses.asdict(ABOUT)
ROW = {"index": 0} | dataclasses.asdict(plain(1))
END = {"finish_reason": "stop", "error": None, "prompt_read": None, "tokens_left_out": 0, "text": ""}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER | {"n": 10**9}], "FILE, line 1: the field n is 1000000000 (expected int <= 1024); "),
        ([HEADER, '{"index": 0, "to', ROW], "FILE, line 2 is damaged: it is no JSON; "),
        ([HEADER, ROW, [1]], "FILE, line 3 is damaged: it is no JSON object; "),
        ([HEADER, ROW | {"index": 2}], "FILE, line 2: the field index is no number below n = 2; "),
        ([HEADER, '{"index": 0, "cost": 1e999}'], "FILE, line 2 contains 1e999, which is no finite number; "),
        ([HEADER, {"index": 0, "end": END}, ROW], "FILE, line 3 comes after the end of continuation 0; "),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(file, lines, said):
    written_out = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(line + "\n" for line in written_out), encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UsageError) as refused:
        read_trace(file)
    sentence = str(refused.value).replace(str(file), "FILE")
    assert said in sentence and sentence.endswith("write it again with --trace.")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(UsageError, match=r"is not a regular file; name .* that --trace has written\.$"):
        read_trace(tmp_path)
