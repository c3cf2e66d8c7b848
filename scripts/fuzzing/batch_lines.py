"""Input files of a batch, through the command itself: hostile lines between well-formed ones, each file run twice."""

import contextlib
import dataclasses
import io
import itertools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing.cases import ACCEPTED, REFUSED, SECONDS, Fault, Surface
from fuzzing.edits import DAMAGES, MUTATIONS, Damage, Mutation, damaged, mutated
from fuzzing.judge import NOISE, not_a_sentence
from fuzzing.small_folder import overlay, served_model
from fuzzing.templates import TEMPLATES
from hypothesis import strategies as st

from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.text import load_tokenizer

_main = runpy.run_module("et_jax.generate")["main"]  # the command, a layer above this one, as a shell would run it
_NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"id": "one", "prompt": "Once upon a time", "max_tokens": 12, "seed": 3},
    {"custom_id": "two", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 9},
    {"id": "three", "prompt": "The cat", "max_tokens": 20, "temperature": 1.5, "top_p": 0.9},
)
_FULL = {
    **{"max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "n": 2, "logprobs": 2},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ["zz", "y"]},
    **{"stop_token_ids": [5], "ignore_eos": True, "priority": 1.5, "deadline": 9.0, "user": "u", "echo": False},
    **{"stream": False, "response_format": {"type": "text"}, "logit_bias": {}, "metadata": {"a": "b"}},
    **{"control": {"decay": 0.5, "noise": 0}},
}
_PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
_MESSAGES = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": _PARTS, "name": "Ann"}]
_CHAT = {"messages": _MESSAGES, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2, "temperature": 1}
_LINES: dict[str, dict[str, Any]] = {
    "plain": {"id": "x", "prompt": "It was", **_FULL},
    "ids": {"custom_id": "x", "prompt": [5, 6, 7], **_FULL},
    "short": {"prompt": "It was"},
    "chat": {"id": 7, **_CHAT},
    "completions": {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "It", **_FULL}},
    "conversation": {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": _CHAT},
}
_RAW = {
    "nothing": b"",
    "blanks": b" \t ",
    "zeros": bytes(5000),
    "list": b"[]",
    "scalar": b"7",
    "torn": b'{"prompt": "It',
    "two": b'{"prompt": "a"} {"prompt": "b"}',
    "single quotes": b"{'prompt': 'a'}",
    "comment": b'{"prompt": "a"} // b',
    "huge": b'{"id": "huge", "prompt": "' + b"word " * 300_000 + b'"}',
    "too long": b'{"id": "long", "prompt": "' + b"x" * 9_000_000 + b'"}',
    "stops": json.dumps({"id": "stops", "prompt": "a", "stop": [f"s{i}" for i in range(30_000)]}).encode(),
    "bomb": b'{"prompt": ' + b"[" * 1_000_000,
    "digits": b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}",
    "taken": b'{"id": "one", "prompt": "a"}',
    "taken by place": b'{"id": "line-1", "prompt": "a"}',
    "latin": b'{"id": "caf\xe9", "prompt": "caf\xe9"}',
    "separators": '{"id": "u\u2028", "prompt": "a\u2028b\u0085c"}'.encode(),
    "carriage": b'{"id": "c",\r "prompt": "a"}\r',
    "twice": b'{"id": "d", "id": "e", "prompt": "a", "prompt": "b"}',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hostile:
    """A line that is mutated, or (raw) one that is no document at all."""

    line: str
    mutation: Mutation
    raw: str | None

    def data(self) -> bytes:
        """Return the line as it stands in the file."""
        if self.raw is not None:
            return _RAW[self.raw]
        return mutated(json.dumps(_LINES[self.line]).encode(), self.mutation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The hostile lines, what is done to the whole file, how the command reads it, and a hostile chat template."""

    lines: tuple[Hostile, ...]
    damage: Damage | None
    chat: bool
    template: str | None


def prepare(folder: Path) -> Callable[[Case], str]:
    """Load a model, have the neighbours answered alone, and return what runs a case."""
    model = served_model(folder / "model")
    engine.load = lambda *_, **__: model  # the command loads in every run; here that is done
    alone: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for line, chat in itertools.product(_NEIGHBOURS, alone):
        code, said, rows = _job(folder, json.dumps(line).encode(), "alone", chat=chat)
        if code or len(rows) != 1:
            raise RuntimeError(f"a well-formed line is refused ({said})")
        alone[chat] |= _texts(rows)

    own = model.tokenizer

    def run(case: Case) -> str:
        try:
            if case.template is not None:
                template = case.template.encode("utf-8", "surrogatepass")
                model.tokenizer = load_tokenizer(
                    overlay(folder / "changed", folder / "model", {"chat_template.jinja": template})
                )
            return serve(case)
        finally:
            model.tokenizer = own

    def serve(case: Case) -> str:
        data = _file(case)
        code, said, rows = _job(folder, data, "out", chat=case.chat)
        if code:
            raise UsageError(said)
        first = (folder / "out.jsonl").read_bytes()
        refusals = [row["error"]["message"] for row in rows if row["error"] is not None]
        for problem, message in ((not_a_sentence(message), message) for message in refusals):
            if problem is not None:
                raise Fault("sentence", f"{problem}: {message}")
        keys = [row["custom_id"] or row["error"]["line"] for row in rows]
        wanted = sum(1 for line in data.split(b"\n") if line.strip())
        if case.damage is None and (len(rows) != wanted or len(set(keys)) != len(keys)):
            raise Fault("rows", f"{len(rows)} rows of {len(set(keys))} names for {wanted} lines")
        texts = _texts(rows)
        for name, text in alone[case.chat].items() if case.damage is None else ():
            if case.template is not None and (case.chat or name == "two"):
                continue  # a conversation, which the template writes
            if texts.get(name) != text:
                raise Fault("neighbour", f"{name} has {texts.get(name)!r} and alone {text!r}")
        refused_lines = {row["error"]["line"] for row in rows if row["error"] is not None}
        for number, line in enumerate(data.split(b"\n"), 1):
            if number not in refused_lines and _has_twins(line):
                raise Fault("silent", f"line {number} has a key twice, and an answer")
        code, said, _ = _job(folder, None, "out", chat=case.chat)
        if code or (folder / "out.jsonl").read_bytes() != first:
            raise Fault("rows", f"the second run changes the output (exit code {code}: {said})")
        return REFUSED if refusals else ACCEPTED

    return run


def _file(case: Case) -> bytes:
    hostile = [line.data() for line in case.lines]
    wellformed = [json.dumps(line).encode() for line in _NEIGHBOURS]
    data = b"\n".join(line for pair in zip(wellformed, [*hostile, b"", b""], strict=False) for line in pair)
    return data if case.damage is None else damaged(data, case.damage)


def _job(folder: Path, data: bytes | None, name: str, *, chat: bool) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the command, on a new output where there is new input; return its exit code, its error and the rows."""
    source, output = folder / f"{name}-in.jsonl", folder / f"{name}.jsonl"
    if data is not None:
        source.write_bytes(data)
        output.unlink(missing_ok=True)
    command = ["--model", str(folder / "model"), "--input", str(source), "--output", str(output), "--max-tokens", "6"]
    command += ["--chat", "--system-prompt", "Be brief"] if chat else []
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = _main(command)
    said = errors.getvalue()
    if len(said) > NOISE:
        raise Fault("noise", f"{len(said)} characters: {said}")
    rows = [json.loads(row) for row in output.read_bytes().splitlines()] if output.exists() else []
    return code, said.partition("error: ")[2].removesuffix("\n"), rows


def _has_twins(line: bytes) -> bool:
    """Return whether a line is JSON in which an object has a key twice."""
    found = []

    def hook(pairs: list[tuple[str, Any]]) -> None:
        found.append(len(dict(pairs)) < len(pairs))

    try:
        json.loads(line, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        return False
    return any(found)


def _texts(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return what the neighbours' answers say."""
    names = {line.get("custom_id", line.get("id")) for line in _NEIGHBOURS}
    return {
        row["custom_id"]: row["response"] and row["response"]["body"]["choices"]
        for row in rows
        if row["custom_id"] in names
    }


SURFACE = Surface(
    cases=st.builds(
        Case,
        lines=st.lists(
            st.builds(
                Hostile,
                line=st.sampled_from(tuple(_LINES)),
                mutation=MUTATIONS,
                raw=st.sampled_from((*(None,) * 40, *_RAW)),
            ),
            min_size=1,
            max_size=3,
        ).map(tuple),
        damage=st.sampled_from((st.none(), st.none(), st.none(), DAMAGES)).flatmap(lambda chosen: chosen),
        chat=st.sampled_from((False, False, True)),
        template=st.sampled_from((*(st.none(),) * 14, TEMPLATES)).flatmap(lambda chosen: chosen),
    ),
    prepare=prepare,
    seconds=lambda case: SECONDS if case.template is None else 60.0,  # each conversation may take its time
)
