"""What a decode step takes under each preset, over one that reads everything, on text.

Rows of text are prefilled and decode greedily on the device, after a step that looks at everything. Presets choose at
every length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from et_jax.control.presets import preset
from et_jax.decode.decoder import snapshot
from et_jax.decode.request import request
from et_jax.serve.chunks import calls
from et_jax.serve.engine import Model, load
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.timing import Round, seconds


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    lengths: tuple[int, ...] = setting((480, 1900), "tokens of a row", least=2, quick=(64,))
    rows: int = setting(2, "rows decoded together", least=2)
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    rounds: int = setting(7, "rounds in which the presets take turns", least=2, quick=2)


def started(model: Model, name: str, rows: np.ndarray, steps: int) -> Round:
    """Return what runs `steps` steps of every row from the same state on."""
    d = model.decoder(preset(name))
    state = d.empty()
    for slot, row in enumerate(rows.tolist()):
        for chunk in calls(d.config, slot, row[:-1]):
            state, _ = d.prefill(model.weights, state, *chunk)
        state = d.insert(state, slot, request(d.config, row, limit=2 * steps + 2, temperature=0.0))
    state, _, _ = d.decode(model.weights, state, 1)
    heads = model.config.num_layers * model.config.num_kv_heads

    def timed() -> dict[str, float]:
        own = jax.block_until_ready(snapshot(state))
        done = []
        took = seconds(lambda: done.append(d.decode(model.weights, own, steps)) or done[0])
        seen = jax.device_get(done[0][1].signals)
        share = seen.blocks_read[:steps].sum() / (seen.pages_held[:steps].sum() * heads)
        return {"milliseconds": 1e3 * took / steps, "share_read": share}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each length."""
    model = load(settings.model, max_num_seqs=settings.rows)
    for length in settings.lengths:
        rows = text.rows(model, settings.text, settings.rows, length)
        arms: dict[str, Callable[[], Round]] = {
            name: partial(started, model, name, rows, settings.steps)
            for name in ("off", "paper", "guarded", "certified", "adaptive")
        }
        yield Group(labels={"tokens": length}, arms=arms, baseline="off", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="What does a decode step take under each preset, over one that reads everything?",
    settings=Settings,
    groups=groups,
    figures={
        "milliseconds": Figure(header="ms a step", against="ratio"),
        "share_read": Figure(header="blocks read"),
    },
    timed=True,
)
