"""What weights and caches in 8 bits change of a model's loss on held-out text, and the bytes they take.

Rows of text are read as prompts but for the last tokens, which pass one by one through the decoder's step, with the
weights and the cache of each form.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from et_jax.decode import cache as kv
from et_jax.decode import eight_bits
from et_jax.models.weights import num_bytes
from et_jax.serve.engine import load
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.teacher_forced import TeacherForced

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 weights": {"quantize": "int8"},
    **{f"{kind} cache": {"cache_dtype": kind} for kind in eight_bits.NAMED_8_BITS},
}


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(40, "rows of text", least=2, quick=2)
    length: int = setting(512, "tokens of a row", least=2, quick=129)
    measured: int = setting(256, "the last tokens of a row, which are measured", least=1, quick=8)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group."""

    def arm(form: str) -> dict[str, Any]:
        model = load(settings.model, dtype="bfloat16", max_num_seqs=2, **FORMS[form])
        rows = text.rows(model, settings.text, settings.rows, settings.length)
        bench = TeacherForced(model, rows, settings.length - 1 - settings.measured)
        heads = model.config.num_layers * model.config.num_kv_heads
        token = heads * kv.token_bytes(model.config.head_dim, model.decoder_config.cache_dtype)
        return bench.dense.by_row("loss") | {"weight_bytes": num_bytes(model.params), "token_bytes": token}

    yield Group(arms={form: partial(arm, form) for form in FORMS}, baseline="bfloat16")


EXPERIMENT = Experiment(
    question="What do weights and caches in 8 bits change of a model's loss, and what bytes do they take?",
    settings=Settings,
    groups=groups,
    figures={
        "loss": Figure(header="loss, nats", against="difference"),
        "weight_bytes": Figure(header="bytes of weights"),
        "token_bytes": Figure(header="bytes of a cached token"),
    },
)
