"""Texts that are decoded together in a world where what a step takes is given: for the laws of lengths, and the clock.

Nothing is computed but what the laws and the clock look at: how many tokens a step drafts of each sequence, how many of
them hold, and how long a burst of steps took.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.control.draft import StepTimes, updated
from et_jax.decode.config import DecoderConfig
from et_jax.decode.fresh import law_numbers
from et_jax.decode.output import StepOutput
from et_jax.serve.step_clock import StepClock, work

MOST_STEPS, BURST = 32, 0.05  # steps of a burst at most, and about its seconds
NO_ENTROPY = jnp.float32(0.0)
after_step = jax.jit(jax.vmap(updated, (None, 0, 0, 0, 0, None, 0)))


@dataclasses.dataclass(kw_only=True)
class World:
    """As many sequences as the decoder's batch, of `context` tokens each, whose drafts hold at `rate`.

    A step takes `times` by what it does, in seconds, and a burst takes `start` beside its steps; both by the clock,
    which is off by a hundredth or two.
    """

    config: DecoderConfig
    times: StepTimes
    start: float
    context: int
    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng, self.clock = np.random.default_rng(self.seed), StepClock(self.config)
        drafting, laws = self.config.draft, self.clock.begin()
        assert drafting is not None and laws is not None
        self.drafting, self.laws = drafting, laws

    def speed(self, tokens: int) -> float:
        """Write texts of so many tokens; return how fast that was over plain decoding, in bursts of eight steps."""
        law, batch = self.laws[0], self.config.batch
        at, most = jnp.full(batch, self.context), jnp.full(batch, self.drafting.most)
        draft = jax.vmap(self.config.fresh_drafts, (0, None, 0))(most, law_numbers(self.laws), at)
        holds = self.rng.random((batch, tokens + self.drafting.most + 2)) < self.rate
        done, steps, seconds = np.zeros(batch, int), 1, 0.0
        while (done < tokens).any():
            drafts, taken, ran = bool(draft.length.max() > 0), self.start, []
            while len(ran) < steps and (done < tokens).any() and bool(draft.length.max() > 0) == drafts:
                here = done < tokens
                length = np.where(here, np.minimum(draft.length, np.maximum(tokens - 1 - done, 0)), 0)
                held = np.array(
                    [np.argmin([*one[at:][:k], False]) for one, at, k in zip(holds, done, length, strict=True)]
                )
                ran.append((here, length, held, np.where(here, self.context + done, 0)))
                done = done + np.where(here, held + 1, 0)
                given = (jnp.asarray(x, jnp.int32) for x in (length, held))
                draft = after_step(law, draft, here, *given, NO_ENTROPY, jnp.asarray(self.context + done, jnp.int32))
            taken += self._takes(ran)
            seconds += taken
            told = self._noted(ran, float(taken * np.exp(0.02 * self.rng.normal())), drafts)
            law = told[0]
            steps = int(np.clip(BURST * len(ran) / taken, 1, MOST_STEPS))
        ones, none = np.ones(batch, bool), np.zeros(batch, int)
        plain = self._takes([(ones, none, none, np.full(batch, self.context + at)) for at in range(tokens)])
        return (plain + self.start * tokens / 8) / seconds

    def _takes(self, ran: list) -> float:
        _, length, _, cached = (np.stack(each) for each in zip(*ran, strict=True))
        done = work(self.drafting, self.config.batch, length, length.max(axis=1), cached)
        return float((done @ np.array(dataclasses.astuple(self.times))).sum())

    def _noted(self, ran: list, seconds: float, drafts: bool) -> tuple[Any, ...]:
        here, length, held, cached = (np.stack(each)[:, None] for each in zip(*ran, strict=True))
        output = object.__new__(StepOutput)
        vars(output).update(
            produced=here,
            drafted=length,
            accepted=held,
            signals=SimpleNamespace(length=cached, pages_held=cached),
            work=[SimpleNamespace(passes=1 + np.broadcast_to(length.max(axis=2, keepdims=True), length.shape))],
        )
        variant = self.config.whole._replace(drafts=drafts)
        self.laws = self.clock.note(output, len(ran), seconds, variant) or self.laws
        return self.laws
