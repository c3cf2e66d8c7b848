"""Do texts follow their grammar, how much of a text does the grammar decide, and what does it cost?

Texts are sampled at temperature 1 under a JSON schema, and `jsonschema` validates each. The entropies are means over a
text's tokens: the model's own, and that of what the grammar leaves. The grammar's time is that of the host alone, in
which the same tokens are matched again. Where speed is measured, end tokens are not heeded.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
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
from scripts.measuring.timing import seconds

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
    params = [SamplingParams(max_tokens=tokens, seed=seed + one, **given) for one in range(number)]
    return [GenerationRequest(prompt=OPENINGS[one % len(OPENINGS)], params=each) for one, each in enumerate(params)]


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
        "matching": np.array([took for took, _ in again]) / counts * 1e6,
    }


def speed(model: Model, requests: list[GenerationRequest]) -> Mapping[str, float]:
    """Return the tokens a second of requests that are decoded together."""
    done: list[Completion] = []
    took = seconds(lambda: done.extend(model.generate(requests)))
    return {"speed": sum(len(one.token_ids) for one in done) / took}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield the texts that are written, and the speeds of each number of sequences."""
    most = max(settings.sequences)
    served = load(settings.model, max_num_seqs=most, max_model_len=settings.length)
    yield Group(labels={"measured": "texts"}, arms={"under the schema": partial(written, served, settings)})
    endless = {"type": "array", "items": SCHEMA, "minItems": settings.tokens}  # longer than the text may be
    for number in sorted(settings.sequences, reverse=True):
        if number < most:
            served = load(settings.model, max_num_seqs=number, max_model_len=settings.length)
        arms = {}
        for name, schema in (("no grammar", None), ("a grammar", endless)):
            requests = under(schema, number, settings.seed, settings.tokens)
            arms[name] = partial(partial, speed, served, requests)
        labels = {"measured": f"all of {number}"}
        yield Group(labels=labels, arms=arms, baseline="no grammar", rounds=settings.rounds)


FIGURES = {
    "valid": Figure(header="valid"),
    "entropy": Figure(header="entropy, nats"),
    "left": Figure(header="under the grammar, nats"),
    "forced": Figure(header="share of forced tokens"),
    "matching": Figure(header="matching, µs a token"),
    "speed": Figure(header="tokens/s", against="ratio"),
}
