"""Calls of the Python API with values of any type, while well-formed streams are open."""

import collections
import dataclasses
import decimal
import fractions
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from fuzzing.cases import ACCEPTED, COMPILING, SECONDS, Fault, Surface
from fuzzing.small_folder import served_model
from hypothesis import strategies as st

from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.engine import Model
from et_jax.serve.requests import GenerationRequest, SamplingParams


class _Text(str):
    """A text of a class of its own."""


class _Liar:
    """A sequence whose length is a lie."""

    def __len__(self) -> int:
        return -1

    def __getitem__(self, place: int) -> int:
        raise KeyError(place)


class _Unprintable:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


_NUMBERS = (
    *(
        True,
        False,
        0,
        1,
        2,
        8,
        -1,
        100,
        127,
        4095,
        4096,
        10**6,
        10**9,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        -(2**63),
        10**30,
    ),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-320, 1e30, 3e38, 1e39, 1e300, math.nan, math.inf, -math.inf),
)
_TEXTS = (
    "",
    " ",
    "a",
    "Once",
    "\ud800",
    "a\udc00b",
    "\0",
    "é🙂",
    "0",
    "1.0",
    "off",
    "paper",
    "guarded",
    "\n",
    b"",
    b"Once",
)
_SEQUENCES = (
    *((), [], {}, set(), (1,), [1, 2], (True, False), (0.5,), ("a",), ["a", "b"], range(3), range(0), range(5, 8)),
    *(
        ("",),
        (None,),
        (-1,),
        (4096,),
        (2**40,),
        {1, 2},
        {"a": 1},
        {"prompt": "a"},
        ((1,), (2,)),
        [[1, 2]],
        [[]],
        [["a"]],
    ),
    *(["a", 1], [1, "a"], [None], ["", "a"], [b"a"], [1.0, 2.0], (math.nan,), ("\ud800",), ("\0",), [[[[5]]]]),
)
_OBJECTS = (None, 1j, b"\xff", int, len, NotImplemented, ..., object, Path("/etc/passwd"))
_MADE: dict[str, Callable[[], Any]] = {
    "5,000 digits": lambda: 10**5000,
    "long text": lambda: "word " * 200_000,
    "many texts": lambda: tuple(f"s{i}" for i in range(100_000)),
    "long texts": lambda: ("x" * 10**6,) * 3,
    "many ids": lambda: [5] * 100_000,
    "127 ids": lambda: [5] * 127,
    "generator": lambda: (id for id in (5, 6)),
    "generator of texts": lambda: (text for text in ("a", "b")),
    "map": lambda: map(int, "56"),
    "deque": lambda: collections.deque([5, 6]),
    "numpy ids": lambda: np.array([5, 6]),
    "numpy matrix": lambda: np.ones((2, 3), np.int64),
    "numpy floats": lambda: np.array([0.5]),
    "numpy empty": lambda: np.array([]),
    "numpy int": lambda: np.int32(3),
    "numpy float": lambda: np.float32(0.5),
    "numpy bool": lambda: np.bool_(True),
    "numpy nan": lambda: np.float64("nan"),
    "numpy text": lambda: np.str_("Once"),
    "numpy texts": lambda: np.array(["a", "b"]),
    "tuple of numpy ids": lambda: (np.int64(5), np.uint8(6)),
    "jax ids": lambda: jnp.array([5, 6]),
    "jax number": lambda: jnp.float32(0.5),
    "decimal": lambda: decimal.Decimal("0.5"),
    "fraction": lambda: fractions.Fraction(1, 2),
    "text of a class": lambda: _Text("Once"),
    "liar": _Liar,
    "unprintable": _Unprintable,
    "object": object,
    "lambda": lambda: lambda: 1,
    "exception": lambda: ValueError("x"),
    "parameters": lambda: SamplingParams(max_tokens=2),
    "request": lambda: GenerationRequest(prompt="Once", params=SamplingParams(max_tokens=2)),
    "requests": lambda: [GenerationRequest(prompt=(5,), params=SamplingParams(max_tokens=2)), "Once"],
}
_MADE |= {repr(value): (lambda value=value: value) for value in _OBJECTS}
_GROUPS = [{repr(value): (lambda value=value: value) for value in group} for group in (_NUMBERS, _TEXTS, _SEQUENCES)]
_GROUPS.append(_MADE)
VALUES = {name: value for group in _GROUPS for name, value in group.items()}
_ANY = st.sampled_from([tuple(group) for group in _GROUPS]).flatmap(st.sampled_from)
_A_NUMBER = st.sampled_from(tuple(_GROUPS[0]))
_A_SMALL_NUMBER = st.sampled_from(
    ("0", "1", "2", "8", "100", "127", "0.5", "1.0", "1.5", "1e-320", "True", "numpy int")
)
_A_PROMPT = st.sampled_from((tuple(_GROUPS[1]), tuple(_GROUPS[2]))).flatmap(st.sampled_from)
_FITTING = {"stop": _A_PROMPT, "stop_token_ids": st.sampled_from(tuple(_GROUPS[2]))}
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_NEIGHBOURS = {  # of several bursts, so that they are amid their texts when the call comes
    "One day": SamplingParams(max_tokens=70, seed=5, ignore_eos=True),
    "The cat": SamplingParams(max_tokens=80, temperature=0.0, logprobs=2, ignore_eos=True),
}
_KINDS = (
    "params",
    "params",
    "params",
    "keyword",
    "both",
    "overruled",
    "request",
    "request",
    "prompt",
    "prompts",
    "stream",
    "control",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of call, and the names of the values it is made with; `fields` are settings of sampling."""

    kind: str
    fields: tuple[tuple[str, str], ...]
    values: tuple[str, str, str]


def prepare(folder: Path) -> Callable[[Case], str]:
    """Load a model, have the neighbours answered alone, and return what runs a case."""
    model = served_model(folder / "model")
    alone = {prompt: model.generate(prompt, params)[0] for prompt, params in _NEIGHBOURS.items()}

    def run(case: Case) -> str:
        streams = {prompt: model.stream(prompt, params) for prompt, params in _NEIGHBOURS.items()}
        begun = {prompt: [next(stream), next(stream)] for prompt, stream in streams.items()}
        try:
            done = _call(model, case)
        finally:
            for prompt, stream in streams.items():
                _same(prompt, begun[prompt], stream, alone[prompt])
        for completion in done:
            completion.to_dict()
            if completion.error is not None:
                raise UsageError(completion.error)
        if case.kind == "overruled" and len(done[0].token_ids) > 1:
            raise Fault("silent", "a keyword beside the settings was not looked at")
        if case.kind in ("prompt", "prompts") and _is_no_prompt(VALUES[case.values[0]]()):
            raise Fault("silent", "bytes or truth values were taken for ids")
        return ACCEPTED

    return run


def _is_no_prompt(value: Any) -> bool:
    """Return whether bytes or truth values stand where ids do, which Python would take for numbers."""
    if isinstance(value, bytes):
        return len(value) > 0
    return isinstance(value, list | tuple) and any(isinstance(id, bool) for id in value)


def _same(prompt: str, begun: list[Any], stream: Any, alone: Completion) -> None:
    try:
        last = [*begun, *stream][-1].completion
    except Exception as error:
        raise Fault("neighbour", f"the stream of {prompt!r} raises {type(error).__name__}: {error}") from error
    if last is None or (last.text, last.token_ids, last.error) != (alone.text, alone.token_ids, None):
        raise Fault("neighbour", f"{prompt!r} ends as {last and (last.text, last.error)!r}, alone {alone.text!r}")


def _call(model: Model, case: Case) -> list[Completion]:
    """Make the call of a case, and return what came of it."""
    fields = {name: VALUES[value]() for name, value in case.fields}
    first, second, third = (VALUES[value]() for value in case.values)
    short = SamplingParams(max_tokens=3)
    match case.kind:
        case "params":
            return model.generate("Once upon a time", SamplingParams(**{"max_tokens": 3} | fields))
        case "keyword":
            return model.generate("Once upon a time", **{"max_tokens": 3} | fields)
        case "overruled":
            return model.generate("Once", short, **fields | {"max_tokens": 1})
        case "both":
            return model.generate("Once", first)
        case "request":
            made = GenerationRequest(prompt="Once", params=short, priority=second, deadline=third)
            other = GenerationRequest(prompt=first, params=short)
            return [completion for _, completion in model.as_completed([made, other])]
        case "prompt":
            return model.generate(first, short)
        case "prompts":
            return model.generate([first, "Once"], short)
        case "stream":
            events = [*model.stream(first, SamplingParams(**{"max_tokens": 3} | fields))]
            return [event.completion for event in events if event.completion is not None]
    return model.generate("Once", short, control=first)


def _oftener(fitting: st.SearchStrategy[str], any_: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return a strategy of which three values in four are of the right kind, and may be served."""
    return st.sampled_from((fitting, fitting, fitting, any_)).flatmap(lambda chosen: chosen)


_SETTINGS = st.sampled_from(_FIELDS).flatmap(
    lambda name: st.tuples(st.just(name), _oftener(_FITTING.get(name, _A_SMALL_NUMBER), _A_NUMBER | _ANY))
)

SURFACE = Surface(
    cases=st.builds(
        Case,
        kind=st.sampled_from(_KINDS),
        fields=st.lists(_SETTINGS, min_size=1, max_size=2).map(tuple),
        values=st.tuples(_oftener(_A_PROMPT, _ANY), _oftener(_A_NUMBER, _ANY), _oftener(_A_NUMBER, _ANY)),
    ),
    prepare=prepare,
    seconds=lambda case: COMPILING if case.kind == "control" else SECONDS,
)
