"""From a burst of steps to one record per token, as plain host values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from et_jax import cost
from et_jax.requests import TokenTrace
from et_jax.state import DecoderConfig, StepOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """What one step did for one slot; `trace` is None unless it produced a token."""

    finished: bool
    failed: bool
    trace: TokenTrace | None


def step_rows(
    config: DecoderConfig, num_multiplied: int, output: StepOutput, num_steps: int, asked: Mapping[int, int]
) -> list[list[StepRow]]:
    """Return the rows of `num_steps` steps by step and slot.

    `output` holds numpy arrays stacked over steps. `num_multiplied` weights meet every token. `asked`
    says by slot how many alternatives of each token are wanted.
    """
    whole = jax.tree.map(lambda x: np.asarray(x[:num_steps]).tolist(), output)  # Python numbers, all at once
    return [
        [_row(config, num_multiplied, whole, step, slot, asked.get(slot, 0)) for slot in range(config.num_slots)]
        for step in range(num_steps)
    ]


def _row(config: DecoderConfig, num_multiplied: int, output: Any, step: int, slot: int, asked: int) -> StepRow:
    produced = output.produced[step][slot]
    return StepRow(
        finished=output.finished[step][slot],
        failed=output.failed[step][slot],
        trace=_trace(config, num_multiplied, output, step, slot, asked) if produced else None,
    )


def _trace(config: DecoderConfig, num_multiplied: int, output: Any, step: int, slot: int, asked: int) -> TokenTrace:
    model, signals = config.model, output.signals
    heads = model.num_layers * model.num_kv_heads
    read, length = signals.blocks_read[step][slot], signals.length[step][slot]
    tokens_read = min(read * config.page_size, length * heads)
    codes = config.page_size if config.controller.key_codes else 0
    looking = cost.selection_flops(signals.summaries_read[step][slot], model.group_size, model.head_dim, codes)
    top: tuple[tuple[int, float], ...] = ()
    if asked and output.top_tokens is not None:
        top = tuple(zip(output.top_tokens[step][slot][:asked], output.top_logprobs[step][slot][:asked], strict=True))
    return TokenTrace(
        token=output.token[step][slot],
        text="",
        entropy=signals.entropy[step][slot],
        varentropy=signals.varentropy[step][slot],
        temperature=output.temperature[step][slot],
        surprisal=signals.surprisal[step][slot],
        blocks_read=read,
        blocks_held=-(-length // config.page_size) * heads,
        kept_mass=signals.kept_mass[step][slot],
        entropic_time=output.entropic_time[step][slot],
        cost=signals.cost[step][slot],
        flops=cost.token_flops(num_multiplied, tokens_read, model.group_size, model.head_dim) + looking,
        guard_rates={name: rate[step][slot] for name, rate in output.guard_rates.items()},
        top=top,
    )
