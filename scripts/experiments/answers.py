"""Which tasks are still answered rightly where presets read a part of a long text?

Every task is asked of the model alone, its own tokens fed back to it. Rows are questions: each answer is compared with
that to the same question with everything read.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.serve.engine import load
from et_jax.tasks.asking import chat_tokens, counter, evaluate, grid
from et_jax.tasks.generators import NUM_PAIRS, TASKS
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting

CONTROLS: dict[str, Controller] = {
    "off": preset("off"),
    "paper": preset("paper"),
    "guarded": preset("guarded"),
    **{f"certified {tolerance:g}": preset("certified", tolerance=tolerance) for tolerance in (0.05, 0.2, 0.5)},
    **{f"adaptive {tolerance:g}": preset("adaptive", tolerance=tolerance) for tolerance in (1e-4, 1e-3)},
    **{f"entropyinfer {size}": preset("entropyinfer", prefill_budget=size) for size in (256, 128)},
}
SHARES = ("share_read", "share_bytes", "prompt_share_read")


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    tasks: tuple[str, ...] = setting(tuple(TASKS), "tasks", choices=tuple(TASKS), quick=("single_key",))
    length: int = setting(2048, "tokens of a question with its answer", least=32, quick=128)
    depths: int = setting(5, "places of the answer in the text", least=1, quick=2)
    samples: int = setting(8, "questions at each depth", least=1, quick=1)
    pairs: int = setting(NUM_PAIRS, "keys besides the one asked for", least=0)
    chat: str = setting("no", "whether the model's chat template asks", choices=("yes", "no"))
    controls: tuple[str, ...] = setting(
        tuple(CONTROLS), "presets", choices=tuple(CONTROLS), quick=("off", "certified 0.5")
    )


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each task."""
    served = load(settings.model)
    if settings.length > served.max_model_len:
        raise UsageError(f"--length is {settings.length}; {served.name} takes at most {served.max_model_len} tokens.")
    chat = settings.chat == "yes"
    sizes = {name: getattr(settings, name) for name in ("depths", "samples", "pairs", "seed")}
    sizes["taken"] = chat_tokens(served.tokenizer) if chat else 0

    def arm(name: str, task: str) -> dict[str, Any]:
        asked = grid(counter(served), [task], [settings.length], **sizes)
        found = evaluate(served, asked, control=CONTROLS[name], chat=chat)
        shares = {figure: [getattr(one, figure) for one in found] for figure in SHARES}
        known = {figure: np.asarray(each) for figure, each in shares.items() if None not in each}
        return {"right": np.asarray([one.right for one in found], np.float64)} | known

    baseline = "off" if "off" in settings.controls else None
    yield from grouped("task", settings.tasks, settings.controls, arm, baseline)


FIGURES = {
    "right": Figure(header="right answers", against="difference"),
    "share_read": Figure(header="blocks read"),
    "share_bytes": Figure(header="bytes moved"),
    "prompt_share_read": Figure(header="blocks read of prompts"),
}
