"""Drafted tokens: proposed from the text itself, laid out as rows beside the tokens they follow."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from et_jax.control.draft import MOST_DRAFTED, SHORT, DraftLength, DraftState, StepTimes, started
from et_jax.control.draft_speed import ON_CPUS, ON_GPUS, ON_TPUS, AcceptanceLength, Costs, RooflineLength
from et_jax.decode.rows import Rows
from et_jax.decode.work import Work
from et_jax.types import pytree, replace

_LONGEST_MATCH = 4  # tokens that a lookup compares, the newest ones
_SHORTEST_MATCH = 2  # and that must agree: what one token alone was followed by seldom comes again


Drafter = Callable[[Int[Array, "r n"], Int[Array, " r"], int], Int[Array, "r t"]]
"""From texts, the position of each one's newest token and a number to that many guesses at what follows it.

From the first that is below 0 on there is no guess.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """The model drafts for itself, over its own cache, reading few blocks (`attention.pruned`).

    Of each KV head they are the fewest that held `mass` of its attention at the last row of the step before, but no
    more than a `share` of all there are; with them the first block, and those written since.
    """

    mass: float = 0.99
    share: float = 0.08

    def __post_init__(self) -> None:
        for name in ("mass", "share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted a share above 0, up to 1")

    def room(self, num_blocks: int) -> int:
        """Return how many of so many blocks may be chosen by what they held."""
        return math.ceil(self.share * num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """How a decoder drafts: up to `most` tokens of a sequence in a step, which `drafter` guesses from its text.

    Where `drafter` is None the decoder's small model writes them, where it is `Pruned` the model itself
    (`drafting.drafter`). `length` decides how many of those. Steps of `widths` different numbers of rows are compiled,
    and the least that holds what was drafted is run. Where `before` has a guess it is taken: another drafting, by a
    function of texts, of as many tokens at most. `times` are what a step is taken to take until some are measured;
    None where no law asks.
    """

    most: int = 8
    length: DraftLength = dataclasses.field(default_factory=AcceptanceLength)
    drafter: Drafter | Pruned | None = dataclasses.field(default_factory=lambda: lookup)
    before: "Drafting | None" = None
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.most <= MOST_DRAFTED:
            raise ValueError(f"most: got {self.most}, wanted 1 to {MOST_DRAFTED}")
        first = self.before
        if first is not None and (not callable(first.drafter) or first.before is not None or first.most != self.most):
            raise ValueError(f"before: wanted a drafting by a function of texts alone, of most = {self.most} tokens")

    @property
    def pruned(self) -> Pruned | None:
        """How the model drafts for itself; None where something else drafts."""
        return self.drafter if isinstance(self.drafter, Pruned) else None

    @property
    def laws(self) -> tuple[DraftLength, ...]:
        """The law of its own lengths and, where there is one, that of what is asked before."""
        return (self.length,) if self.before is None else (self.length, self.before.length)

    def started(self, most: Int[Array, ""], laws: tuple[DraftLength, ...], context: Int[Array, ""]) -> DraftState:
        """Return the state of a sequence whose request allows `most` drafted tokens a step, by `laws` as now told.

        It has `context` tokens in the cache. A model that drafts for itself drafts nothing at its first token, for it
        has read for none yet; it wants to, where the first draft is to come as soon as it may.
        """
        told, *others = laws
        begun = told.by_past(started(self.length, most))
        if self.pruned is not None:
            length = told.length(begun, jnp.zeros(()), context)
            begun = replace(begun, length=jnp.minimum(length, most).astype(jnp.int32))
        if self.before is None:
            return begun
        return replace(begun, before=self.before.started(most, tuple(others), context))

    def widths(self, batch: int) -> tuple[int, ...]:
        """Return the numbers of rows a step may have: `batch` tokens, and beside them each of `widths` drafted ones.

        Sequences whose model drafts for itself draft alike, as many tokens as one of `lengths`, each of them.
        """
        if self.pruned is not None:
            return tuple(batch * (1 + length) for length in (0, *lengths(self.most)))
        return tuple(batch + drafted for drafted in widths(self.most, batch))

    def ahead(self, width: int, batch: int) -> int:
        """Return how many drafted tokens one sequence may have in a step of so many rows."""
        return min(self.most, width // batch - 1 if self.pruned is not None else width - batch)

    def needed(self, batch: int, count: Int[Array | np.ndarray, "*s r"]) -> Int[Array | np.ndarray, "*s"]:
        """Return the least number of rows that hold `count` drafted tokens of every row."""
        return batch + (count.sum(axis=-1) if self.pruned is None else batch * count.max(axis=-1))


def widths(most: int, batch: int) -> tuple[int, ...]:
    """Return for how many drafted tokens steps of `batch` sequences, each with `most` of them at most, are compiled.

    They are none; a short draft, unless rows stand beside it that make a whole one cost hardly more; a whole one, four,
    sixteen and so on; and as many as there may be. A width costs as much to compile as any other, and time to load that
    grows with the square of their number.
    """
    drafted, some = {0, batch * most} | ({min(SHORT, most)} if batch <= most else set()), most
    while 2 * some <= batch * most:
        drafted.add(some)
        some *= 4
    return tuple(sorted(drafted))


def lengths(most: int) -> tuple[int, ...]:
    """Return for how many tokens of every sequence steps are compiled, where all draft alike: a few, and `most`."""
    return (*(length for length in (SHORT, 2 * SHORT) if length < most), most)


def by_acceptance(most: int, sequences: int, batch: int, drafter_cost: float = 0.0) -> AcceptanceLength:
    """Return the law of lengths where `sequences` of a step's `batch` run, each with `most` drafted tokens at most.

    It takes the sequences to draft alike. A row costs a part of reading the weights (`Costs`), which a plain step does
    once for `batch` rows; a drafted token costs `drafter_cost` of a plain step beside. A sequence whose
    drafts fail drafts again when that costs a hundredth of the steps since.
    """
    row = _costs().row
    cost = row * sequences / (1.0 + row * batch) + drafter_cost
    return AcceptanceLength(widths=tuple(w / sequences for w in widths(most, batch)[1:])).at(cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadSizes:
    """What a step reads: bytes of `weights`, and of a `token` of one sequence in the cache, over all `layers`.

    Where the rows of a sequence do not read its pages `together` each of them reads them all.
    """

    weights: int
    token: int
    layers: int
    together: bool = True


def rough_times(batch: int, sizes: ReadSizes, passing: float = 0.0, share: float = 0.0) -> StepTimes:
    """Return what steps of `batch` sequences are taken to take, in passes that read the weights once (`Costs`).

    A pass that drafts takes `passing` of a plain step without a cache, and reads a `share` of the cache.
    """
    costs = _costs()
    bytes_of_pass = sizes.weights + sizes.layers * costs.passing
    plain, cached = 1.0 + costs.row * batch, costs.cached * sizes.token / bytes_of_pass
    return StepTimes(
        plain=plain,
        plain_cached=cached,
        drafted=passing * plain,
        drafted_cached=share * cached,
        row=costs.row + costs.position / bytes_of_pass / batch,
        row_cached=(costs.cached_row if sizes.together else 1.0) * cached,
    )


def by_roofline(most: int, batch: int, times: StepTimes) -> RooflineLength:
    """Return the law of lengths of a model that drafts for itself, in steps of these times.

    It takes the `batch` sequences of a step to be as long as one another, and to draft alike.
    """
    return RooflineLength(times=times.alike(batch, batch), widths=tuple(map(float, lengths(most))))


def _costs() -> Costs:
    return {"cpu": ON_CPUS, "gpu": ON_GPUS}.get(jax.default_backend(), ON_TPUS)


@pytree
class Drafts:
    """The first `count` of `token` are guesses at what follows the newest token of each row.

    `work` is what the small model did to make them, `own` what the model itself did; None of one that did nothing.
    `before` says which rows have theirs from what is asked before the drafter; None where nothing is.
    """

    token: Int[Array, "r t"]
    count: Int[Array, " r"]
    work: Work | None = None
    own: Work | None = None
    before: Bool[Array, " r"] | None = None


def lookup(text: Int[Array, "r n"], newest: Int[Array, " r"], most: int) -> Int[Array, "r t"]:
    """Return `most` guesses at what follows position `newest` of each text: what followed where it read so before.

    The place is that whose last tokens, four at most, match the longest run of the newest ones; of several the
    latest. Where less than `most` tokens follow it, they are repeated, as a text does that runs in a circle. Where
    no place matches two tokens, there is no guess: -1. Prompt lookup: Saxena 2023.
    """
    place = jnp.arange(text.shape[1], dtype=jnp.int32)
    matches = jnp.ones(text.shape, bool)
    length = jnp.zeros(text.shape, jnp.int32)
    for back in range(_LONGEST_MATCH):
        wanted = jnp.take_along_axis(text, jnp.maximum(newest - back, 0)[:, None], axis=1)
        matches &= (jnp.roll(text, back, axis=1) == wanted) & (place >= back) & (place < newest[:, None])
        length += matches.astype(jnp.int32)
    best = jnp.max(length * text.shape[1] + place, axis=1, initial=-1, where=length >= _SHORTEST_MATCH)
    found = best % text.shape[1]
    ahead = jnp.arange(most, dtype=jnp.int32) % jnp.maximum(newest - found, 1)[:, None]
    return jnp.where((best < 0)[:, None], -1, jnp.take_along_axis(text, (found + 1)[:, None] + ahead, axis=1))


def laid_out(rows: Rows, drafts: Drafts, width: int) -> tuple[Rows, Int[Array, " w"], Int[Array, "r t1"]]:
    """Return `width` rows: those given, then every drafted token; with each row's end, and where each token stands.

    A row's end is how many tokens its slot has in the cache once all are written. `at[i, j]` is the row of the j-th
    token of row i, 0 being the one given; where there is none, row i itself.
    """
    num_rows, most = drafts.token.shape
    wanted = (jnp.arange(most) < drafts.count[:, None]).reshape(-1)
    [source] = jnp.nonzero(wanted, size=width - num_rows, fill_value=num_rows * most)
    row, ahead, real = jnp.minimum(source // most, num_rows - 1), source % most, source < num_rows * most
    slot = jnp.arange(num_rows, dtype=jnp.int32) if rows.slot is None else rows.slot
    drafted = Rows(
        slot=slot[row],
        token=drafts.token[row, ahead],
        position=rows.position[row] + 1 + ahead,
        run=rows.run[row] & real,
        shift=None if rows.shift is None else rows.shift[row],
    )
    whole = jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)]), replace(rows, slot=slot), drafted)
    own = jnp.arange(num_rows, dtype=jnp.int32)
    rank = (num_rows + jnp.cumsum(wanted, dtype=jnp.int32) - 1).reshape(num_rows, most)
    at = jnp.concatenate([own[:, None], jnp.where(wanted.reshape(num_rows, most), rank, own[:, None])], axis=1)
    end = rows.place + 1 + drafts.count
    return whole, end[jnp.concatenate([own, row])], at


def allowed(
    run: Bool[Array, " r"], wanted: Int[Array, " r"], remaining: Int[Array, " r"], most: int
) -> Int[Array, " r"]:
    """Return how many tokens to draft: as `wanted`, but none that a text of `remaining` tokens could not take."""
    return jnp.where(run, jnp.clip(jnp.minimum(wanted, remaining - 1), 0, most), 0)
