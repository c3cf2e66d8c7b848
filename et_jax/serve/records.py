"""From a burst of steps to one record per token, as plain host values."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from et_jax.decode import cost
from et_jax.decode.state import DecoderConfig, StepOutput
from et_jax.serve.completions import TokenTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """What one step did for one slot; `trace` is None unless it produced a token, `fault` as in `StepOutput`."""

    finished: bool
    fault: int
    trace: TokenTrace | None


class Burst:
    """The first `num_steps` steps of an `output` of numpy arrays stacked over steps, as Python numbers.

    `traffic` is what a step may read; `num_multiplied` weights meet every token.
    """

    def __init__(
        self, config: DecoderConfig, traffic: cost.Traffic, num_multiplied: int, output: StepOutput, num_steps: int
    ) -> None:
        self._config, self._traffic, self._num_multiplied = config, traffic, num_multiplied
        self._output: Any = jax.tree.map(lambda x: np.asarray(x[:num_steps]).tolist(), output)  # all at once

    def num_served(self, step: int, slots: Iterable[int]) -> int:
        """Return how many of `slots` a step brought a token."""
        return sum(self._output.produced[step][slot] for slot in slots)

    def row(self, step: int, slot: int, asked: int, num_served: int) -> StepRow:
        """Return what a step did for a slot, one of the `num_served` that share its weights.

        `asked` is how many alternatives of the token are wanted.
        """
        output = self._output
        return StepRow(
            finished=output.finished[step][slot],
            fault=output.fault[step][slot],
            trace=self._trace(step, slot, asked, num_served) if output.produced[step][slot] else None,
        )

    def _trace(self, step: int, slot: int, asked: int, num_served: int) -> TokenTrace:
        config, output, model = self._config, self._output, self._config.model
        signals, heads = output.signals, model.num_layers * model.num_kv_heads
        read, looked = signals.blocks_read[step][slot], signals.summaries_read[step][slot]
        length = signals.length[step][slot]
        tokens_read = min(read * config.page_size, length * heads)
        codes = config.page_size if "codes" in config.keeps else 0
        looking = cost.selection_flops(looked, model.group_size, model.head_dim, codes)
        top: tuple[tuple[int, float], ...] = ()
        if asked and output.top_tokens is not None:
            top = tuple(
                zip(output.top_tokens[step][slot][:asked], output.top_logprobs[step][slot][:asked], strict=True)
            )
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
            attention_entropy=_known(signals.attention_entropy[step][slot]),
            least_attention_entropy=_known(signals.least_attention_entropy[step][slot]),
            entropic_time=output.entropic_time[step][slot],
            cost=cost.charged_bytes(self._traffic, num_served, read, looked),
            flops=cost.token_flops(self._num_multiplied, tokens_read, model.group_size, model.head_dim) + looking,
            guard_rates={name: rate[step][slot] for name, rate in output.guard_rates.items()},
            top=top,
        )


def _known(signal: float) -> float | None:
    """A signal, None where it is not known."""
    return None if math.isnan(signal) else signal
