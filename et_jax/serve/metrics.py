"""Counters of a model's requests and tokens, and their text for Prometheus.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/, text, version 0.0.4.
"""

import dataclasses
from pathlib import Path
from typing import Any

from et_jax.decode.cost import Price
from et_jax.io.files import replace_file
from et_jax.serve.completions import Completion, TokenTrace
from et_jax.serve.programs.compilation import Made

_PREFIX = "et_jax_"


def _counter(name: str, what: str, start: int | float = 0) -> Any:
    """Return a field that starts at `start`, exported as `name` (which ends in its unit) with `what` as its help."""
    return dataclasses.field(default=start, metadata={"name": name, "help": what})


@dataclasses.dataclass(kw_only=True)
class Metrics:
    """Sums since the model was loaded; replicas add to them.

    `finished` counts continuations by finish reason. `cached_prompt_tokens` are prompt tokens found in the prefix
    cache. `cost` and `flops` are those of ended continuations; `idle_cost` and `idle_flops` are those of rows that
    brought no token. `programs_compiled_late` are those of `programs_compiled` that a round waited for after warm-up.
    `waiting_seconds` (submission to first slot) and `serving_seconds` (first slot to end) are sums over requests.
    """

    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = _counter("prompt_tokens_total", "Prompt tokens taken in.")
    cached_prompt_tokens: int = _counter("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache.")
    generated_tokens: int = _counter("generated_tokens_total", "Tokens produced.")
    drafted_tokens: int = _counter("drafted_tokens_total", "Tokens drafted and verified.")
    accepted_tokens: int = _counter("accepted_tokens_total", "Drafted tokens that were accepted.")
    small_tokens: int = _counter("small_tokens_total", "Tokens that the small model of two produced.")
    steps: int = _counter("steps_total", "Decode steps run on the device.")
    step_rows: int = _counter("step_rows_total", "Rows that decode steps ran.")
    idle_rows: int = _counter("idle_rows_total", "Rows of decode steps that served no sequence.")
    preemptions: int = _counter("preemptions_total", "Sequences that gave up their slot before their end.")
    programs_compiled: int = _counter("programs_compiled_total", "Programs compiled or read from the cache.")
    programs_compiled_late: int = _counter(
        "programs_compiled_late_total", "Programs that were waited for after warm-up."
    )
    tracing_seconds: float = _counter("tracing_seconds_total", "Seconds of tracing and lowering programs.", 0.0)
    compiling_seconds: float = _counter("compiling_seconds_total", "Seconds of compiling programs.", 0.0)
    loading_seconds: float = _counter(
        "loading_seconds_total", "Seconds of loading programs from the compile cache.", 0.0
    )
    entropic_time: float = _counter("entropic_time_nats_total", "Entropy resolved, in nats.", 0.0)
    cost: float = _counter("cost_bytes_total", "Bytes moved by decode steps, charged to the rows served.", 0.0)
    flops: float = _counter("flops_total", "FLOPs of decode steps, of the rows served.", 0.0)
    idle_cost: float = _counter("idle_cost_bytes_total", "Bytes of weights read by steps that produced no token.", 0.0)
    idle_flops: float = _counter("idle_flops_total", "FLOPs of rows that produced no token.", 0.0)
    waiting_seconds: float = _counter("waiting_seconds_total", "Seconds that requests waited for a slot.", 0.0)
    serving_seconds: float = _counter("serving_seconds_total", "Seconds that requests were in service.", 0.0)

    def add_programs(self, made: Made) -> None:
        """Add the number of programs and the seconds that they took."""
        self.programs_compiled += made.programs
        self.tracing_seconds += made.tracing
        self.compiling_seconds += made.compiling
        self.loading_seconds += made.loading

    def add_rows(self, num_rows: int, num_served: int, idle: Price) -> None:
        """Count the rows of a step, and the price of the idle ones: empty, failed, or past the end of their text."""
        self.step_rows += num_rows
        self.idle_rows += num_rows - num_served
        self.idle_flops += idle.flops
        self.idle_cost += 0.0 if num_served else idle.shared

    def add_token(self, token: TokenTrace) -> None:
        """Count a token that was produced, and the tokens drafted in its step."""
        self.generated_tokens += 1
        self.drafted_tokens += token.drafted
        self.accepted_tokens += token.accepted
        self.small_tokens += token.by_small is True

    def add_completion(self, done: Completion) -> None:
        """Count a continuation that ended, with its entropic time, cost and FLOPs."""
        self.finish(done.finish_reason)
        self.entropic_time += done.entropic_time
        self.cost += done.cost
        self.flops += done.flops

    def finish(self, reason: str) -> None:
        """Count a continuation that ended for `reason`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def prometheus(self) -> str:
        """Return every counter in Prometheus's text format."""
        finished = [(f'{{reason="{_escaped(reason)}"}}', count) for reason, count in sorted(self.finished.items())]
        lines = _family("requests_finished_total", "Continuations that ended, by finish reason.", finished)
        for field in dataclasses.fields(self):
            if field.metadata:
                value = getattr(self, field.name)
                lines += _family(field.metadata["name"], field.metadata["help"], [("", value)])
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file at `path` by the counters, atomically.

        Raises UsageError if it cannot be written.
        """
        replace_file(path, self.prometheus())


def _family(name: str, what: str, samples: list[tuple[str, int | float]]) -> list[str]:
    name = _PREFIX + name
    values = [f"{name}{labels} {value:.17g}" for labels, value in samples]
    return [f"# HELP {name} {what}", f"# TYPE {name} counter", *values]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
