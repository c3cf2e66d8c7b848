"""When the learning rate falls, when the rows grow, and how many steps fit into the given time."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, a constant learning rate, a linear decay to zero (WSD: Hu et al. 2024, MiniCPM, section 4).

    `warmup` is in steps; `decay_share` and `long_share` are the last parts of all steps, in which the
    learning rate falls and rows are `long_length` tokens instead of `short_length`. `long_cost` is the
    measured time of a step of long rows relative to one of short rows with as many tokens.
    """

    warmup: int = 100
    decay_share: float = 0.3
    long_share: float = 0.18
    short_length: int = 512
    long_length: int = 2048
    long_cost: float = 1.4

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens per row, in training order."""
        return self.short_length, self.long_length

    def factor(self, step: int, steps: int | None) -> float:
        """Return the learning rate of `step` relative to its peak; with `steps` None the decay is not planned yet."""
        rise = min(1.0, (step + 1) / self.warmup)
        return rise if steps is None else min(rise, (steps - step) / max(1.0, self.decay_share * steps))

    def length(self, step: int, steps: int | None) -> int:
        """Return the tokens per row of `step`."""
        return self.short_length if steps is None or step < (1 - self.long_share) * steps else self.long_length

    def planned(self, step: int, seconds_per_step: float, seconds_left: float) -> int | None:
        """Return the number of steps at which to end if the decay must begin at `step` to end in time, else None.

        Until then the learning rate does not depend on the number of steps, so a run that is given this
        number from the start is identical.
        """
        steps = round(step / (1 - self.decay_share))
        equivalents = (steps - step) + self.long_share * steps * (self.long_cost - 1)
        return steps if equivalents * seconds_per_step >= seconds_left else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Rows that grow in stages, at a rate that is constant between a warm-up and a linear decay to zero.

    `stages` are (first step, tokens per row): a recall circuit forms much faster with
    short rows. Both they and `decay_steps` count steps rather than shares, so that a run can be
    extended without changing the steps already trained.
    """

    warmup: int = 50
    decay_steps: int = 400
    stages: tuple[tuple[int, int], ...] = ((0, 128), (450, 256), (560, 512), (680, 1024), (780, 2048))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens per row, in training order."""
        return tuple(length for _, length in self.stages)

    def factor(self, step: int, steps: int | None) -> float:
        """Return the learning rate of `step` relative to its peak; with `steps` None the decay is not planned yet."""
        rise = min(1.0, (step + 1) / self.warmup)
        return rise if steps is None else min(rise, (steps - step) / self.decay_steps)

    def length(self, step: int, steps: int | None) -> int:
        """Return the tokens per row of `step`: those of the last stage that has begun."""
        return [length for begin, length in self.stages if begin <= step][-1]

    def planned(self, step: int, seconds_per_step: float, seconds_left: float) -> int | None:
        """Return the number of steps if the decay must begin at `step` to end in time, else None."""
        return step + self.decay_steps if self.decay_steps * seconds_per_step >= seconds_left else None
