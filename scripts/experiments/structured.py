"""Do texts follow their grammar, how much of a text does the grammar decide, and what does it cost?

Texts are sampled at temperature 1 under a JSON schema, and `jsonschema` validates each. The entropies are means over a
text's tokens: the model's own, and that of what the grammar leaves. The grammar's time is that of the host alone, in
which the same tokens are matched again. Of sequences without a grammar the speed is measured alone, and beside as many
others that have one or have none; end tokens are not heeded there.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema
import numpy as np

from et_jax.decode.sampling.steering import MOST_FORCED
from et_jax.serve.completions import Completion
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["north", "south", "east", "west"]},
        "note": {"type": "string", "maxLength": 60},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 24}, "maxItems": 4},
        "open": {"type": "boolean"},
    },
    "required": ["place", "note", "hours", "open"],
    "additionalProperties": False,
}
MOST_TOKENS = 256  # of a text that follows the schema
OPENINGS = ("It was", "The old house by the river", "In the spring of that year", "She said that the office is")


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model(quick="bundled")
    texts: int = setting(500, "texts under the schema", least=2, quick=4)
    sequences: tuple[int, ...] = setting((1, 16), "decoded together", least=1, quick=(2,))
    length: int = setting(512, "tokens of a prompt and its text at most", least=64, quick=256)
    tokens: int = setting(160, "tokens of a text whose speed is measured", least=8, quick=16)
    rounds: int = setting(7, "rounds of arms in turn", least=1, quick=1)


def under(schema: Mapping[str, Any] | None, number: int, seed: int, tokens: int) -> list[GenerationRequest]:
    """Return requests under a schema, or without one; seeds count up."""
    given = {"ignore_eos": True} if schema is None else {"json_schema": json.dumps(schema)}
    return [
        GenerationRequest(
            prompt=OPENINGS[one % len(OPENINGS)], params=SamplingParams(max_tokens=tokens, seed=seed + one, **given)
        )
        for one in range(number)
    ]


def matched(model: Model, request: GenerationRequest, tokens: Sequence[int]) -> tuple[float, int]:
    """Return the processor's seconds to match a text again, and how many of its tokens were forced."""
    matcher, left, num_forced = model.sequences(0, request)[0].matcher, list(tokens), 0
    assert matcher is not None
    began = time.thread_time()
    while left:
        forced, _ = matcher.ahead(MOST_FORCED)
        num_forced += min(len(forced), len(left))
        for token in left[: 1 + len(forced)]:
            matcher.take(token)
        left = left[1 + len(forced) :]
    return time.thread_time() - began, num_forced


def valid(done: Completion) -> bool:
    """Return whether a text is whole and follows the schema."""
    try:
        jsonschema.validate(json.loads(done.text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return done.finish_reason == "stop"


def written(model: Model, settings: Settings) -> dict[str, Any]:
    """Return the figures of texts under the schema."""
    requests = under(SCHEMA, settings.texts, settings.seed, MOST_TOKENS)
    done = model.generate(requests)
    again = [matched(model, *each) for each in zip(requests, (one.token_ids for one in done), strict=True)]
    counts = np.array([len(one.token_ids) for one in done])
    return {
        "valid": np.array([valid(one) for one in done]),
        "entropy": np.array([np.mean([row.entropy for row in one.trace]) for one in done]),
        "left": np.array([np.mean([row.constrained_entropy or 0.0 for row in one.trace]) for one in done]),
        "forced": np.array([forced for _, forced in again]) / counts,
        "matching": np.array([seconds for seconds, _ in again]) / counts * 1e6,
    }


def speed(model: Model, first: list[GenerationRequest], others: list[GenerationRequest]) -> Mapping[str, float]:
    """Return the tokens/s of the first requests until the last of them ends, beside others that go on until then."""
    ended = tokens = 0
    began, events = time.perf_counter(), model.stream([*first, *others])
    for event in events:
        if event.prompt_index < len(first):
            tokens += event.trace is not None
            ended += event.completion is not None
        if ended == len(first):
            break
    took = time.perf_counter() - began
    events.close()
    return {"speed": tokens / took}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield the texts that are written, and for each number of sequences the speeds of all and of half of them."""
    seed, tokens = settings.seed, settings.tokens
    most = max(settings.sequences)
    served = load(settings.model, max_num_seqs=most, max_model_len=settings.length)
    yield Group(labels={"measured": "texts"}, arms={"under the schema": partial(written, served, settings)})
    endless = {"type": "array", "items": SCHEMA, "minItems": tokens}  # longer than the text may be
    for number in sorted(settings.sequences, reverse=True):
        if number < most:
            served = load(settings.model, max_num_seqs=number, max_model_len=settings.length)
        half = number // 2
        free, bound = (under(one, number, seed, tokens) for one in (None, endless))
        long_free, long_bound = (under(one, half, seed + half, MOST_TOKENS) for one in (None, endless))
        yield Group(
            labels={"measured": f"all of {number}"},
            arms=in_rounds(served, {"no grammar": (free, []), "a grammar": (bound, [])}),
            baseline="no grammar",
            rounds=settings.rounds,
        )
        if half:
            beside = {"beside half without one": long_free, "beside half with one": long_bound, "alone": []}
            yield Group(
                labels={"measured": f"half of {number}, no grammar"},
                arms=in_rounds(served, {name: (free[:half], others) for name, others in beside.items()}),
                baseline="beside half without one",
                rounds=settings.rounds,
            )


def in_rounds(model: Model, arms: Mapping[str, tuple[list[GenerationRequest], ...]]) -> dict[str, Any]:
    """Return arms that measure in each round the speed of some requests beside others."""
    return {name: partial(partial, speed, model, *each) for name, each in arms.items()}


FIGURES = {
    "valid": Figure(header="valid"),
    "entropy": Figure(header="entropy, nats"),
    "left": Figure(header="under the grammar, nats"),
    "forced": Figure(header="share of forced tokens"),
    "matching": Figure(header="matching, µs a token"),
    "speed": Figure(header="tokens/s", against="ratio"),
}
DOCUMENT = "evidence.md"
