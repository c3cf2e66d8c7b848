"""How near do summaries of a long passage stay to those of dense attention?

Rows are passages of held-out text, which the model is asked to summarise, greedily. ROUGE-L compares a summary with
that of dense attention; `same` is the share of the summary's tokens before the first that differs. Two arms give the
scale: weights in 8 bits, which read everything, and the dense summary of the next passage. Quest and the window read an
eighth of the blocks.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.engine import load
from et_jax.serve.totals import Totals
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.selectors import COMPARED

REQUEST = "Summarise this text in three sentences."
DENSE, EIGHT_BITS, NEXT = "off", "off, weights in 8 bits", "the next passage's"
ARMS = (*COMPARED, EIGHT_BITS, NEXT)
BESIDES = 32  # tokens for the request and the template


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    text: Path = experiment.text()
    passages: int = setting(16, "passages", least=2, quick=2)
    length: int = setting(2048, "tokens of a passage with its summary", least=128, quick=192)
    tokens: int = setting(96, "tokens of a summary at most", least=4, quick=8)
    chat: str = setting("yes", "whether the model's chat template asks", choices=("yes", "no"), quick="no")
    controls: tuple[str, ...] = setting(ARMS, "arms", choices=ARMS, quick=("off", "quest", NEXT))


def prefix(tokens: tuple[int, ...], others: tuple[int, ...]) -> float:
    """Return the share of `others` before the first token that differs."""
    same = [own == other for own, other in zip(tokens, others, strict=False)]
    return (same.index(False) if False in same else len(same)) / len(others)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group, with an arm for each selector. Raises UsageError without the package rouge_score."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UsageError("summaries needs rouge_score; install it with: pip install 'et_jax[eval]'.") from error
    served = load(settings.model)
    room = settings.length - settings.tokens - BESIDES
    if settings.length > served.max_model_len or room < 1:
        raise UsageError(
            f"--length is {settings.length}; give more than {settings.tokens + BESIDES} tokens, and at most "
            f"{served.max_model_len} with {served.name}."
        )
    passages = [
        served.tokenizer.decode(row.tolist()) for row in text.rows(served, settings.text, settings.passages, room)
    ]
    scorer = RougeScorer(["rougeL"])

    @cache
    def summaries(name: str) -> list[Completion]:
        model = load(settings.model, quantize="int8") if name == EIGHT_BITS else served
        asked = [f"{one.strip()}\n\n{REQUEST}" for one in passages]
        chats = [[{"role": "user", "content": one}] for one in asked]
        prompts = [model.tokenizer.chat(one) for one in chats] if settings.chat == "yes" else asked
        control = COMPARED.get(name, COMPARED[DENSE])
        found = model.generate(prompts, max_tokens=settings.tokens, temperature=0.0, control=control)
        return [one.checked() for one in found]

    def arm(name: str) -> dict[str, Any]:
        dense = summaries(DENSE)
        found = [*dense[1:], dense[0]] if name == NEXT else summaries(name)
        totals = [Totals.of([one]) for one in found]
        pairs = list(zip(dense, found, strict=True))
        return {
            "rouge": np.array([scorer.score(one.text, other.text)["rougeL"].fmeasure for one, other in pairs]),
            "same": np.array([prefix(other.token_ids, one.token_ids) for one, other in pairs]),
            "share_read": np.array([one.share_read for one in totals]),
            "share_bytes": np.array([one.share_bytes for one in totals]),
        }

    yield Group(arms={name: partial(arm, name) for name in settings.controls})


FIGURES = {
    "rouge": Figure(header="ROUGE-L, F"),
    "same": Figure(header="tokens before the first that differs"),
    "share_read": Figure(header="blocks read"),
    "share_bytes": Figure(header="bytes moved"),
}
