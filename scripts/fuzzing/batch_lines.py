"""Input files of a batch, through the command itself: hostile lines between well-formed ones, each file run twice."""

import contextlib
import io
import itertools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from et_jax.errors import UsageError
from et_jax.serve import engine
from scripts.fuzzing import edits
from scripts.fuzzing.small_folder import served_model
from scripts.fuzzing.watch import ACCEPTED, NOISE, REFUSED, Fault, not_a_sentence

_main = runpy.run_module("et_jax.generate")["main"]  # the command itself
_NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"id": "one", "prompt": "Once upon a time", "max_tokens": 12, "seed": 3},
    {"custom_id": "two", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 9},
    {"id": "three", "prompt": "The cat", "max_tokens": 20, "temperature": 1.5, "top_p": 0.9},
)
_FULL: dict[str, Any] = {
    **{"max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "n": 2, "logprobs": 2},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ["zz", "y"]},
    **{"top_n_sigma": 1.0, "typical_p": 0.9, "eta_cutoff": 0.01, "top_h": 0.4, "p_less": True},
    **{"stop_token_ids": [5], "ignore_eos": True, "priority": 1.5, "deadline": 9.0, "user": "u", "echo": False},
    **{
        "stream": False,
        "response_format": {"type": "text"},
        "logit_bias": {"5": 2},
        "bad_words": ["x"],
        "min_tokens": 2,
        "metadata": {"a": "b"},
    },
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
    **{"nothing": b"", "blanks": b" \t ", "zeros": bytes(5000), "list": b"[]", "scalar": b"7"},
    **{"two": b'{"prompt": "a"} {"prompt": "b"}', "comment": b'{"prompt": "a"} // b', "quotes": b"{'prompt': 'a'}"},
    **{"taken": b'{"id": "one", "prompt": "a"}', "taken by place": b'{"id": "line-1", "prompt": "a"}'},
    **{"latin": b'{"id": "caf\xe9", "prompt": "caf\xe9"}', "carriage": b'{"id": "c",\r "prompt": "a"}\r'},
    "huge": b'{"id": "huge", "prompt": "' + b"word " * 300_000 + b'"}',
    "too long": b'{"id": "long", "prompt": "' + b"x" * 9_000_000 + b'"}',
    "stops": json.dumps({"id": "stops", "prompt": "a", "stop": [f"s{i}" for i in range(30_000)]}).encode(),
    "bomb": b'{"prompt": ' + b"[" * 1_000_000,
    "torn": b'{"prompt": "It',
    "digits": b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}",
    "separators": '{"id": "u\u2028", "prompt": "a\u2028b\u0085c"}'.encode(),
    "twice": b'{"id": "d", "id": "e", "prompt": "a", "prompt": "b"}',
}


def draw(random: Random) -> dict[str, Any]:
    """Return a case: one to three hostile lines, damage to the file, whether lines are chats."""

    def line() -> tuple[str, Any]:
        raw = random.random() < 1 / 3
        return (random.choice(list(_RAW)), None) if raw else (random.choice(list(_LINES)), edits.changes(random))

    lines = [line() for _ in range(random.randint(1, 3))]
    damages = edits.damages(random) if random.random() < 0.25 else None
    return {"lines": lines, "damages": damages, "chat": random.random() < 0.3}


def prepare(folder: Path) -> Callable[..., str]:
    """Load a model, run the neighbours alone, and return the function that runs a case."""
    model = served_model(folder / "model")
    engine.load = lambda *_, **__: model  # the command loads in every run; here the model is loaded already
    valid = [json.dumps(line).encode() for line in _NEIGHBOURS]
    alone: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for line, chat in itertools.product(valid, alone):
        code, message, rows = _job(folder, line, "alone", chat)
        if code or len(rows) != 1:
            raise RuntimeError(f"a well-formed line is refused ({message})")
        alone[chat] |= _choices(rows)

    def run(lines: list[tuple[str, Any]], damages: Any, chat: bool) -> str:
        hostile = [
            _RAW[name] if changes is None else edits.mutated(json.dumps(_LINES[name]).encode(), changes)
            for name, changes in lines
        ]
        data = b"\n".join(itertools.chain(*zip(valid, [*hostile, b"", b""], strict=False)))
        code, message, rows = _job(folder, edits.mutated(data, damages) if damages else data, "out", chat)
        if code:
            raise UsageError(message)
        _check(rows, (folder / "out-in.jsonl").read_bytes().split(b"\n"), None if damages else alone[chat])
        first = (folder / "out.jsonl").read_bytes()
        code, message, _ = _job(folder, None, "out", chat)
        if code or (folder / "out.jsonl").read_bytes() != first:
            raise Fault("rows", f"the second run changes the output (exit code {code}: {message})")
        return REFUSED if any(row["error"] for row in rows) else ACCEPTED

    return run


def _check(rows: list[dict[str, Any]], lines: list[bytes], expected: dict[str, Any] | None) -> None:
    """Raise Fault unless rows fit their lines. `expected`: the neighbours' results; None where the file is damaged."""
    refused = {row["error"]["line"]: row["error"]["message"] for row in rows if row["error"] is not None}
    for message in refused.values():
        if (problem := not_a_sentence(message)) is not None:
            raise Fault("sentence", f"{problem}: {message}")
    if expected is not None:
        names = {row["custom_id"] or row["error"]["line"] for row in rows}
        wanted = sum(1 for line in lines if line.strip())
        if not len(rows) == len(names) == wanted:
            raise Fault("rows", f"{len(rows)} rows of {len(names)} names for {wanted} lines")
    found = _choices(rows)
    for name, choices in (expected or {}).items():
        if found.get(name) != choices:
            raise Fault("neighbour", f"{name} has {found.get(name)!r} and alone {choices!r}")
    for number, line in enumerate(lines, 1):
        if number not in refused and _has_twins(line):
            raise Fault("silent", f"line {number} has a key twice, and no error")


def _job(folder: Path, data: bytes | None, name: str, chat: bool) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the command, on a new output where there is new input; return its exit code, its error and the rows."""
    source, output = folder / f"{name}-in.jsonl", folder / f"{name}.jsonl"
    if data is not None:
        source.write_bytes(data)
        output.unlink(missing_ok=True)
    command = ["--model", str(folder / "model"), "--input", str(source), "--output", str(output), "--max-tokens", "6"]
    command += ["--chat", "--system-prompt", "Be brief"] if chat else []
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = _main(command)
    printed = errors.getvalue()
    if len(printed) > NOISE:
        raise Fault("noise", f"{len(printed)} characters: {printed}")
    rows = [json.loads(row) for row in output.read_bytes().splitlines()] if output.exists() else []
    return code, printed.partition("error: ")[2].removesuffix("\n"), rows


def _has_twins(line: bytes) -> bool:
    """Return whether a line is JSON in which an object has a key twice."""
    found = []
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(line, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)))
        return any(found)
    return False


def _choices(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return the choices of the neighbours' responses, by name."""
    names = {line.get("custom_id", line.get("id")) for line in _NEIGHBOURS}
    bodies = {row["custom_id"]: row["response"] and row["response"]["body"] for row in rows}
    return {name: body and body["choices"] for name, body in bodies.items() if name in names}
