"""How many tokens a second do many requests get at once, against one at a time?

Prompts are windows of a text, of which some begin alike; lengths, temperatures and truncations are mixed, and end
tokens are ignored, so that every arm writes the same number of tokens. One at a time means a model loaded for one
sequence, which is as fast as one sequence gets. Beside the largest size stand the same sequences in several replicas,
in a pool too small for its slots, so that sequences move to the host and back, and without cached prefixes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.io.texts import read_text
from et_jax.serve.engine import load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.timing import Round, seconds

PROMPTS, OUTPUTS = (8, 24, 60, 150, 300), (16, 48, 96, 160)  # tokens
SHARE_ALIKE = 0.3  # of the prompts begin with the text's first tokens


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model(quick="bundled-small")
    text: Path = setting(REPOSITORY / "README.md", "of which prompts are cut", kind="text")
    sizes: tuple[int, ...] = setting((8, 16, 32, 64), "requests at once", least=2, quick=(2,))
    pages: int = setting(512, "pages of the pool that is too small for its slots", least=2, quick=40)
    replicas: int = setting(2, "replicas of the largest size", least=2)
    requests: int = setting(200, "requests", least=1, quick=3)
    rounds: int = setting(5, "rounds in which the arms take turns", least=2, quick=2)


def requests(tokens: list[int], count: int, seed: int) -> list[GenerationRequest]:
    """Return the mixture."""
    rng, mixed = np.random.default_rng(seed), []
    for number in range(count):
        length, output = int(rng.choice(PROMPTS)), int(rng.choice(OUTPUTS))
        start = 0 if rng.random() < SHARE_ALIKE else int(rng.integers(len(tokens) - length))
        params = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            seed=number,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.9, 1.0])),
            top_k=int(rng.choice([0, 40])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.2])),
        )
        mixed.append(GenerationRequest(prompt=tuple(tokens[start : start + length]), params=params))
    return mixed


def served(settings: Settings, size: int, how: dict[str, Any]) -> Round:
    """Return what serves all requests from an empty cache, `size` at once."""
    model = load(settings.model, max_num_seqs=size, max_model_len=max(PROMPTS) + max(OUTPUTS) + 1, **how)
    tokens = model.tokenizer.encode(read_text(settings.text, "The text"))
    asked = requests(tokens, settings.requests, settings.seed)
    parts = [[request] for request in asked] if size == 1 else [asked]

    def timed() -> dict[str, float]:
        model.replicas().forget_prefixes()
        before = vars(model.metrics).copy()
        took = seconds(lambda: [model.generate(part) and None for part in parts])
        gained = {name: getattr(model.metrics, name) - before[name] for name in ("generated_tokens", *COUNTED)}
        share = gained["cached_prompt_tokens"] / gained["prompt_tokens"]
        return gained | {"tokens_per_second": gained["generated_tokens"] / took, "share_cached": share}

    return timed


COUNTED = ("steps", "preemptions", "cached_prompt_tokens", "prompt_tokens", "programs_compiled_late")


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group of all sizes."""
    largest, each = max(settings.sizes), max(settings.sizes) // settings.replicas
    arms: dict[str, Callable[[], Round]] = {"one at a time": partial(served, settings, 1, {})}
    arms |= {f"{size} at once": partial(served, settings, size, {}) for size in settings.sizes}
    divided = {"replicas": settings.replicas}
    arms[f"{settings.replicas} replicas of {each}"] = partial(served, settings, each, divided)
    arms[f"{largest} at once, {settings.pages} pages"] = partial(
        served, settings, largest, {"num_pages": settings.pages}
    )
    arms[f"{largest} at once, no cached prefixes"] = partial(served, settings, largest, {"prefix_cache": False})
    yield Group(arms=arms, baseline="one at a time", rounds=settings.rounds)


FIGURES = {
    "tokens_per_second": Figure(header="tokens a second", against="ratio"),
    "preemptions": Figure(header="preemptions"),
    "share_cached": Figure(header="prompt tokens cached"),
    "programs_compiled_late": Figure(header="programs compiled late"),
}
