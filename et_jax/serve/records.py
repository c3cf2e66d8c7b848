"""Converts a burst of steps to one record per token, as plain host values."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from et_jax.control.budget import PromptRecord
from et_jax.control.switch import MODEL, SMALL
from et_jax.decode import cost
from et_jax.decode.output import StepOutput
from et_jax.serve.completions import PromptRead, TokenTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """The charge of a sequence for some steps; fields are those of `TokenTrace`."""

    cost: float = 0.0
    flops: float = 0.0
    audited: int = 0
    agreed: int = 0


NOTHING = Charge()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """The result of a step for a slot; `trace` is None unless it produced a token, `fault` is that of `StepOutput`.

    `unpaid` is the charge that the slot's next token pays.
    """

    finished: bool
    fault: int
    trace: TokenTrace | None
    unpaid: Charge


class Burst:
    """The first `num_steps` steps of an `output`, whose arrays have leading axes step and position, as Python numbers.

    `costs` are the cost models of the decoder's models.
    """

    def __init__(self, costs: tuple[cost.Model, ...], output: StepOutput, num_steps: int) -> None:
        self._costs = costs
        cut = jax.tree.map(lambda x: np.asarray(x[:num_steps]), output)
        filled = np.any(cut.produced | (cut.fault > 0), axis=-1)
        filled[:, 0] = True
        cut = jax.tree.map(lambda x: x[filled], cut)  # most positions of drafts are empty
        self._places: list[list[int]] = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1).tolist()
        ran = np.any([work.tokens > 0 for work in cut.work], axis=0) & (cut.fault == 0)
        prices = [cost.price(*each) for each in zip(costs, jax.tree.map(np.float64, cut.work), strict=True)]
        top = cut.top_tokens, cut.top_logprobs  # stay arrays: only a few requests ask for any
        self._output: Any = jax.tree.map(lambda x: x if any(x is one for one in top) else x.tolist(), cut)
        alone, nothing = np.full(cut.token.shape, None), np.zeros_like(cut.token)
        turns = (cut.by_small, cut.audit.audited, cut.audit.agreed) if cut.audit else (alone, nothing, nothing)
        self._by_small, self._audited, self._agreed = (each.tolist() for each in turns)
        self._served: list[list[bool]] = ran.tolist()
        self._shared: list[list[float]] = np.transpose([one.shared.max(axis=-1) for one in prices]).tolist()
        self._own: list[list[float]] = np.sum([one.own for one in prices], axis=0).tolist()
        self._flops: list[list[float]] = np.sum([one.flops for one in prices], axis=0).tolist()

    def num_positions(self, step: int) -> int:
        """Return the number of positions at which a step produced tokens."""
        return sum(place >= 0 for place in self._places[step])

    def num_served(self, step: int, slots: Iterable[int]) -> int:
        """Return for how many of `slots` a step ran a model without a fault."""
        return sum(self._served[self._places[step][0]][slot] for slot in slots)

    def num_sharing(self, step: int, slots: Iterable[int]) -> int:
        """Return how many rows of `slots`, over the positions of a step, share the cost of its weights."""
        served = [self._served[place] for place in self._places[step] if place >= 0]
        return sum(each[slot] for slot in slots for each in served)

    def idle(self, step: int, num_rows: int) -> cost.Price:
        """Return the price of `num_rows` rows of a step without a token, for the model that the step ran."""
        shared = self._shared[self._places[step][0]]
        model = next((one for one, weights in zip(self._costs, shared, strict=True) if weights), self._costs[MODEL])
        return cost.Price(shared=sum(shared), own=0.0, flops=cost.flops(model, num_rows))

    def row(
        self, step: int, position: int, slot: int, asked: int, num_sharing: int, unpaid: Charge = NOTHING
    ) -> StepRow:
        """Return the result of a step for a slot at a position, one of the `num_sharing` rows that share its weights.

        `asked` is the number of alternatives to return. The token is also charged `unpaid`, from earlier steps.
        """
        output, place, first = self._output, self._places[step][position], self._places[step][0]
        if self._served[place][slot]:
            shared = sum(self._shared[first]) / num_sharing
            unpaid = Charge(
                cost=unpaid.cost + self._own[place][slot] + shared,
                flops=unpaid.flops + self._flops[place][slot],
                audited=unpaid.audited + self._audited[place][slot],
                agreed=unpaid.agreed + self._agreed[place][slot],
            )
        trace = None
        if output.produced[place][slot]:
            trace, unpaid = self._trace(step, position, slot, asked, unpaid), NOTHING
        return StepRow(
            finished=output.finished[place][slot], fault=output.fault[place][slot], trace=trace, unpaid=unpaid
        )

    def _trace(self, step: int, position: int, slot: int, asked: int, charge: Charge) -> TokenTrace:
        """Return the trace of a token, with its charge."""
        place, first = self._places[step][position], self._places[step][0]
        output, signals = self._output, self._output.signals
        by_small = self._by_small[place][slot]
        model = self._costs[by_small or MODEL]
        blocks_read, allocated = signals.blocks_read[place][slot], signals.allocated_pages[place][slot] * model.heads
        moved = cost.cached_bytes(model, blocks_read, signals.summaries_read[place][slot])
        top: tuple[tuple[int, float], ...] = ()
        if asked and output.top_tokens is not None:
            tokens, logprobs = (one[place, slot, :asked].tolist() for one in (output.top_tokens, output.top_logprobs))
            top = tuple(zip(tokens, logprobs, strict=True))
        reads = None
        if output.reads is not None and not by_small:
            reads = tuple(map(tuple, output.reads[place][slot]))
        took = output.work[SMALL if by_small else MODEL].experts
        return TokenTrace(
            token=output.token[place][slot],
            text="",
            entropy=signals.entropy[place][slot],
            varentropy=signals.varentropy[place][slot],
            temperature=output.temperature[place][slot],
            surprisal=signals.surprisal[place][slot],
            constrained_entropy=signals.constrained_entropy[place][slot],
            blocks_read=blocks_read,
            blocks_held=allocated,
            share_bytes=moved / (allocated * model.block) if by_small is None else None,
            kept_mass=_known(signals.kept_mass[place][slot]),
            attention_entropy=_known(signals.attention_entropy[place][slot]),
            least_attention_entropy=_known(signals.least_attention_entropy[place][slot]),
            entropic_time=output.entropic_time[place][slot],
            cost=charge.cost,
            flops=charge.flops,
            guard_rates={name: rate[place][slot] for name, rate in output.guard_rates.items()},
            drafted=0 if position else output.drafted[first][slot],
            accepted=position < output.accepted[first][slot],
            by_small=by_small,
            audited=charge.audited,
            agreed=charge.agreed,
            top=top,
            reads=reads,
            experts=None if took is None else took.chosen[place][slot],
        )


def _known(signal: float) -> float | None:
    """Return a signal, None for NaN."""
    return None if math.isnan(signal) else signal


def prompt_read(record: PromptRecord, slot: int) -> PromptRead:
    """Return how much of the prompt in a slot was read, from numpy arrays with a row for each slot."""
    probes = 0.0 if record.num_probes is None else float(record.num_probes[slot])
    return PromptRead(
        blocks_read=float(record.blocks_read[slot]),
        blocks_held=float(record.blocks_held[slot]),
        mass_kept=None if record.mass is None or not probes else float(record.mass[slot].sum()) / probes,
    )
