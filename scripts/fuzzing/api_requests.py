"""Calls of the Python API with values of any type, while well-formed streams are open."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np

from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.engine import Model
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.fuzzing.edits import listed
from scripts.fuzzing.small_folder import served_model
from scripts.fuzzing.watch import ACCEPTED, COMPILING, SECONDS, Fault

# Expressions, evaluated anew for each case.
_NUMBERS = listed("""
    True  False  0  1  2  8  -1  100  127  4095  4096  10**6  10**9  2**31  2**32  2**63 - 1  2**63  -(2**63)  10**30
    0.0  -0.0  0.5  1.0  1.5  -0.5  1e-320  1e30  3e38  1e39  1e300  float('nan')  float('inf')  -float('inf')
""")
_SMALL = listed("0  1  2  8  100  127  0.5  1.0  1.5  1e-320  True  np.int32(3)")
_TEXTS = listed(r"""
    ''  ' '  'a'  'Once'  '\ud800'  'a\udc00b'  '\0'  'é🙂'  '0'  '1.0'  'off'  'paper'  'guarded'  '\n'  b''  b'Once'
""")
_SEQUENCES = listed(r"""
    ()  []  {}  set()  (1,)  [1, 2]  (True, False)  (0.5,)  ('a',)  ['a', 'b']  range(3)  range(0)  range(5, 8)  ('',)
    (None,)  (-1,)  (4096,)  (2**40,)  {1, 2}  {'a': 1}  {'prompt': 'a'}  ((1,), (2,))  [[1, 2]]  [[]]  [['a']]
    ['a', 1]  [1, 'a']  [None]  ['', 'a']  [b'a']  [1.0, 2.0]  (float('nan'),)  ('\ud800',)  ('\0',)  [[[[5]]]]
""")
_OBJECTS = listed(r"""
    None  1j  b'\xff'  int  len  NotImplemented  ...  object  object()  Path('/etc/passwd')  10**5000
    'word ' * 200_000  tuple(f's{i}' for i in range(100_000))  ('x' * 10**6,) * 3  [5] * 100_000  [5] * 127
    (id for id in (5, 6))  (text for text in ('a', 'b'))  map(int, '56')  __import__('collections').deque([5, 6])
    np.array([5, 6])  np.ones((2, 3), int)  np.array([0.5])  np.array([])  np.int32(3)  np.float32(0.5)  np.bool_(True)
    np.float64('nan')  np.str_('Once')  np.array(['a', 'b'])  (np.int64(5), np.uint8(6))  jnp.array([5, 6])
    jnp.float32(0.5)  __import__('decimal').Decimal('0.5')  __import__('fractions').Fraction(1, 2)
    type('Text', (str,), {})('Once')  type('Unprintable', (), {'__repr__': lambda self: 1 / 0})()
    type('Liar', (), {'__len__': lambda self: -1, '__getitem__': lambda self, place: {}[place]})()
    (lambda: 1)  ValueError('x')  SHORT  GenerationRequest(prompt='Once', params=SHORT)
    [GenerationRequest(prompt=(5,), params=SHORT), 'Once']
""")
_ANY = (_NUMBERS, _TEXTS, _SEQUENCES, _OBJECTS)
_FITTING = {"stop": (_TEXTS, _SEQUENCES), "stop_token_ids": (_SEQUENCES,)}
SHORT = SamplingParams(max_tokens=3)
_NAMES = {each.__name__: each for each in (Path, GenerationRequest)} | {"np": np, "jnp": jnp, "SHORT": SHORT}
_NEIGHBOURS = {  # long enough to be still open after the call
    "One day": SamplingParams(max_tokens=70, seed=5, ignore_eos=True),
    "The cat": SamplingParams(max_tokens=80, temperature=0.0, logprobs=2, ignore_eos=True),
}


def _requests(model: Model, _: Any, first: Any, second: Any, third: Any) -> list[Completion]:
    requests = [
        GenerationRequest(prompt="Once", params=SHORT, priority=second, deadline=third),
        GenerationRequest(prompt=first, params=SHORT),
    ]
    return [completion for _, completion in model.as_completed(requests)]


def _streamed(model: Model, fields: dict[str, Any], first: Any, *_: Any) -> list[Completion]:
    events = [*model.stream(first, SamplingParams(**{"max_tokens": 3} | fields))]
    return [event.completion for event in events if event.completion is not None]


# Of a model, the settings of sampling, and three other values.
_CALLS: dict[str, Callable[..., list[Completion]]] = {
    "params": lambda model, fields, *_: model.generate("Once upon", SamplingParams(**{"max_tokens": 3} | fields)),
    "keyword": lambda model, fields, *_: model.generate("Once upon", **{"max_tokens": 3} | fields),
    "overruled": lambda model, fields, *_: model.generate("Once", SHORT, **fields | {"max_tokens": 1}),
    "both": lambda model, _, first, *__: model.generate("Once", first),
    "request": _requests,
    "prompt": lambda model, _, first, *__: model.generate(first, SHORT),
    "prompts": lambda model, _, first, *__: model.generate([first, "Once"], SHORT),
    "stream": _streamed,
    "control": lambda model, _, first, *__: model.generate("Once", SHORT, control=first),
}


def draw(random: Random) -> dict[str, Any]:
    """Return a case: a call, the settings of sampling, and the other values that it passes."""

    def value(fitting: tuple[list[str], ...]) -> str:
        groups = fitting if random.random() < 0.75 else _ANY  # three in four are of the right kind
        return random.choice(random.choice(groups))

    kind = random.choice(("params", "params", "request", *_CALLS))
    names = random.choices([field.name for field in dataclasses.fields(SamplingParams)], k=random.randint(1, 2))
    fields = {name: value(_FITTING.get(name, (_SMALL,))) for name in names}
    values = value((_TEXTS, _SEQUENCES)), value((_NUMBERS,)), value((_NUMBERS,))
    return {"kind": kind, "fields": fields, "values": values, "seconds": COMPILING if kind == "control" else SECONDS}


def made(expression: str) -> Any:
    """Return the value of an expression."""
    return eval(expression, dict(_NAMES))


def prepare(folder: Path) -> Callable[..., str]:
    """Load a model, generate for the neighbours alone, and return the function that runs a case."""
    model = served_model(folder / "model")
    alone = {prompt: model.generate(prompt, params)[0] for prompt, params in _NEIGHBOURS.items()}

    def run(kind: str, fields: dict[str, str], values: tuple[str, str, str]) -> str:
        streams = {prompt: model.stream(prompt, params) for prompt, params in _NEIGHBOURS.items()}
        begun = {prompt: [next(stream), next(stream)] for prompt, stream in streams.items()}
        try:
            done = _CALLS[kind](model, {name: made(value) for name, value in fields.items()}, *map(made, values))
        finally:
            for prompt, stream in streams.items():
                _same(prompt, begun[prompt], stream, alone[prompt])
        for completion in done:
            completion.to_dict()
            if completion.error is not None:
                raise UsageError(completion.error)
        if kind == "overruled" and len(done[0].token_ids) > 1:
            raise Fault("silent", "a keyword beside the settings was ignored")
        prompt = made(values[0])
        booleans = isinstance(prompt, list | tuple) and any(isinstance(id, bool) for id in prompt)
        if kind in ("prompt", "prompts") and (booleans or (isinstance(prompt, bytes) and prompt)):
            raise Fault("silent", "bytes or truth values were taken for ids")
        return ACCEPTED

    return run


def _same(prompt: str, begun: list[Any], stream: Any, alone: Completion) -> None:
    """Raise Fault unless the rest of a neighbour's stream gives the completion that it has alone."""
    try:
        last = [*begun, *stream][-1].completion
    except Exception as error:
        raise Fault("neighbour", f"the stream of {prompt!r} raises {type(error).__name__}: {error}") from error
    if last is None or (last.text, last.token_ids, last.error) != (alone.text, alone.token_ids, None):
        raise Fault("neighbour", f"{prompt!r} ends as {last and (last.text, last.error)!r}, alone {alone.text!r}")
