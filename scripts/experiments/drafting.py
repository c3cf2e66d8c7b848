"""How many tokens a step brings with drafts, and how often drafts are accepted, by who drafts.

The model goes on from prompts of a text, greedily and sampled; a draft has as many tokens as the law "fixed" allows.
Accepted tokens do not depend on the machine: with the same seed a text is the one it would be without drafts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.serve.engine import load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    small: str = experiment.model("bundled-small")
    text: Path = experiment.text()
    prompts: int = setting(12, "prompts of the text", least=2, quick=2)
    prompt_tokens: int = setting(512, "tokens of a prompt", least=2, quick=64)
    tokens: int = setting(128, "tokens of each continuation", least=2, quick=12)
    drafted: int = setting(4, "tokens drafted in a step, at most", least=1, quick=2)
    shares: tuple[float, ...] = setting(
        (0.04, 0.08, 0.15), "of blocks, that the model's own drafts read", least=0.01, most=1.0, quick=(0.5,)
    )
    temperatures: tuple[float, ...] = setting((0.0, 0.7), "of texts", least=0.0, quick=(0.0,))


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each temperature."""
    drafters: dict[str, dict[str, Any]] = {
        "none": {},
        "lookup": {"draft": "lookup"},
        "small model": {"draft": settings.small},
        **{f"self, {share:g} of the blocks": {"draft": "self", "draft_share": share} for share in settings.shares},
    }
    sizes = {"max_num_seqs": 2, "max_model_len": settings.prompt_tokens + settings.tokens + settings.drafted + 1}

    def arm(name: str, temperature: float) -> dict[str, Any]:
        how = drafters[name]
        fixed = {"draft_length": "fixed", "draft_tokens": settings.drafted} if how else {}
        with load(settings.model, **how, **fixed, **sizes) as served:
            rows = text.rows(served, settings.text, settings.prompts, settings.prompt_tokens)
            params = SamplingParams(max_tokens=settings.tokens, temperature=temperature, ignore_eos=True)
            asked = [GenerationRequest(prompt=tuple(row), params=params) for row in rows.tolist()]
            traces = [done.trace for done in served.generate(asked)]
        drafted, accepted = (
            np.array([sum(getattr(one, w) for one in t) for t in traces]) for w in ("drafted", "accepted")
        )
        steps = np.array([sum(not one.accepted for one in trace) for trace in traces])
        figures = {"tokens_per_step": np.array([len(trace) for trace in traces]) / steps}
        return figures | ({"accepted": accepted / np.maximum(drafted, 1)} if how else {})

    for temperature in settings.temperatures:
        arms = {name: partial(arm, name, temperature) for name in drafters}
        yield Group(labels={"temperature": temperature}, arms=arms, baseline="none")


EXPERIMENT = Experiment(
    question="How many tokens does a step bring with drafts, and how often are drafts accepted?",
    settings=Settings,
    groups=groups,
    figures={
        "tokens_per_step": Figure(header="tokens a step", against="ratio"),
        "accepted": Figure(header="drafted tokens accepted"),
    },
    document="drafting.md",
)
