"""From a burst of steps to one record per token, as plain host values."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from et_jax.control.budget import PromptNotes
from et_jax.decode import cost
from et_jax.decode.config import DecoderConfig
from et_jax.decode.output import StepOutput
from et_jax.serve.completions import PromptRead, TokenTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """What one step did for one slot; `trace` is None unless it produced a token, `fault` as in `StepOutput`."""

    finished: bool
    fault: int
    trace: TokenTrace | None


class Burst:
    """The first `num_steps` steps of an `output` of numpy arrays stacked over steps, as Python numbers.

    Each step is stacked over its tokens too. `traffic` is what a step may read, `costs` what each of the decoder's
    models takes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        traffic: cost.Traffic,
        costs: tuple[cost.Model, ...],
        output: StepOutput,
        num_steps: int,
    ) -> None:
        self._config, self._traffic, self._costs = config, traffic, costs
        self._num_multiplied = costs[0].num_multiplied
        cut = jax.tree.map(lambda x: np.asarray(x[:num_steps]), output)
        told = np.any(cut.produced | (cut.fault > 0), axis=-1)
        told[:, 0] = True
        cut = jax.tree.map(lambda x: x[told], cut)  # most positions of drafts hold nothing
        self._places: list[list[int]] = np.where(told, np.cumsum(told).reshape(told.shape) - 1, -1).tolist()
        self._output: Any = jax.tree.map(lambda x: x.tolist(), cut)  # all at once

    def num_positions(self, step: int) -> int:
        """Return at how many positions, one after the other, a step brought tokens."""
        return sum(place >= 0 for place in self._places[step])

    def num_served(self, step: int, slots: Iterable[int]) -> int:
        """Return how many of `slots` a step brought a token."""
        return sum(self._output.produced[self._places[step][0]][slot] for slot in slots)

    def num_produced(self, step: int, slots: Iterable[int]) -> int:
        """Return how many tokens a step brought `slots`."""
        produced = [self._output.produced[place] for place in self._places[step] if place >= 0]
        return sum(each[slot] for slot in slots for each in produced)

    def row(self, step: int, position: int, slot: int, asked: int, num_produced: int) -> StepRow:
        """Return what a step did for a slot at a position, one of the `num_produced` tokens that share its weights.

        `asked` is how many alternatives of the token are wanted.
        """
        output, place = self._output, self._places[step][position]
        return StepRow(
            finished=output.finished[place][slot],
            fault=output.fault[place][slot],
            trace=self._trace(step, position, slot, asked, num_produced) if output.produced[place][slot] else None,
        )

    def _trace(self, step: int, position: int, slot: int, asked: int, num_produced: int) -> TokenTrace:
        config, output = self._config, self._output
        if config.controller.switch is not None:
            return self._trace_switched(step, position, slot, asked)
        model = config.model
        first, step = self._places[step][0], self._places[step][position]
        drafted, accepted = output.drafted[first][slot], output.accepted[first][slot]
        signals, heads = output.signals, model.num_layers * model.num_kv_heads
        read, looked = signals.blocks_read[step][slot], signals.summaries_read[step][slot]
        length = signals.length[step][slot]
        tokens_read = min(read * config.page_size, length * heads)
        codes = config.page_size if "codes" in config.keeps else 0
        looking = cost.selection_flops(looked, model.group_size, model.head_dim, codes)
        wasted_read, wasted_looks, wasted = 0, 0, 0.0
        if position == 0 and drafted > accepted:
            wasted_read, wasted_looks = output.blocks_wasted[first][slot], output.summaries_wasted[first][slot]
            tokens = wasted_read * config.page_size
            wasted = cost.token_flops(0, tokens, model.group_size, model.head_dim)
            wasted += (drafted - accepted) * cost.token_flops(self._num_multiplied, 0, 1, 1)
            wasted += cost.selection_flops(wasted_looks, model.group_size, model.head_dim, codes)
        small_bytes, small_flops = self._small(first, position, slot, length, num_produced)
        held = signals.pages_held[step][slot] * heads
        moved = read * self._traffic.block + looked * self._traffic.summary
        return self._told(
            step,
            slot,
            asked,
            blocks_held=held,
            share_bytes=moved / (held * self._traffic.block),
            cost=cost.charged_bytes(self._traffic, num_produced, read + wasted_read, looked + wasted_looks)
            + small_bytes,
            flops=cost.token_flops(self._num_multiplied, tokens_read, model.group_size, model.head_dim)
            + looking
            + wasted
            + small_flops,
            drafted=0 if position else drafted,
            accepted=position < accepted,
        )

    def _trace_switched(self, step: int, position: int, slot: int, asked: int) -> TokenTrace:
        """The record of a token of either model; what both did since the last token is charged to it."""
        config, output, at = self._config, self._output, self._places[step][position]
        length, by_small = output.signals.length[at][slot], output.by_small[at][slot]
        moved, flops = 0.0, 0.0
        for model, tokens, passes in zip(
            self._costs, output.spent.tokens[at][slot], output.spent.passes[at][slot], strict=True
        ):
            moved += passes * model.weights + model.cached_bytes(-(-tokens // config.chunk), length)
            flops += model.flops(tokens, length)
        held = -(-length // config.page_size) * self._costs[by_small].heads
        told = {"blocks_held": held, "cost": moved, "flops": flops, "by_small": by_small}
        if config.audit:
            told |= {name: getattr(output.spent, name)[at][slot] for name in ("audited", "agreed")}
        return self._told(at, slot, asked, **told)

    def _told(self, at: int, slot: int, asked: int, **own: Any) -> TokenTrace:
        """The record of the token at a place of the output, with what is its `own`."""
        output, signals = self._output, self._output.signals
        top: tuple[tuple[int, float], ...] = ()
        if asked and output.top_tokens is not None:
            top = tuple(zip(output.top_tokens[at][slot][:asked], output.top_logprobs[at][slot][:asked], strict=True))
        reads = None
        if output.reads is not None and not own.get("by_small"):
            reads = tuple(map(tuple, output.reads[at][slot]))
        return TokenTrace(
            token=output.token[at][slot],
            text="",
            entropy=signals.entropy[at][slot],
            varentropy=signals.varentropy[at][slot],
            temperature=output.temperature[at][slot],
            surprisal=signals.surprisal[at][slot],
            blocks_read=signals.blocks_read[at][slot],
            kept_mass=signals.kept_mass[at][slot],
            attention_entropy=_known(signals.attention_entropy[at][slot]),
            least_attention_entropy=_known(signals.least_attention_entropy[at][slot]),
            entropic_time=output.entropic_time[at][slot],
            guard_rates={name: rate[at][slot] for name, rate in output.guard_rates.items()},
            top=top,
            reads=reads,
            **own,
        )

    def _small(self, first: int, position: int, slot: int, length: int, num_produced: int) -> tuple[float, float]:
        """The bytes and FLOPs of the small model: its weights shared by all tokens, the rest with a slot's first."""
        if len(self._costs) == 1:
            return 0.0, 0.0
        output, (_, small) = self._output, self._costs
        passes = max(output.small_passes[first])
        tokens = 0 if position else output.small_tokens[first][slot]
        shared = passes * small.weights / num_produced
        return shared + small.cached_bytes(tokens, length), small.flops(tokens, length)


def _known(signal: float) -> float | None:
    """A signal, None where it is not known."""
    return None if math.isnan(signal) else signal


def prompt_read(notes: PromptNotes, slot: int) -> PromptRead:
    """Return what was read of the prompt in a slot, of numpy arrays with a row for each slot."""
    probes = 0.0 if notes.num_probes is None else float(notes.num_probes[slot])
    return PromptRead(
        blocks_read=float(notes.blocks_read[slot]),
        blocks_held=float(notes.blocks_held[slot]),
        mass_kept=None if notes.mass is None or not probes else float(notes.mass[slot].sum()) / probes,
    )
