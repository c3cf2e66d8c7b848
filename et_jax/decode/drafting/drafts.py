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

_LONGEST_MATCH = 4  # the most newest tokens that a lookup compares
_SHORTEST_MATCH = 2  # the fewest that must agree: the successor of a single token seldom recurs


Drafter = Callable[[Int[Array, "r n"], Int[Array, " r"], int], Int[Array, "r t"]]
"""From texts, the position of each one's newest token and a number to that many guesses at the following tokens.

The first guess below 0 ends the guesses.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """Self-drafting: the model drafts over its own cache, reading few blocks (`attention.pruned`).

    Each KV head reads the fewest blocks with `mass` of its attention at the last row of the previous step, at most
    a `share` of all; and also the first block, and those written since.
    """

    mass: float = 0.99
    share: float = 0.08

    def __post_init__(self) -> None:
        for name in ("mass", "share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted a share above 0, up to 1")

    def room(self, num_blocks: int) -> int:
        """Return the most of `num_blocks` blocks that are selected by mass."""
        return math.ceil(self.share * num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """How a decoder drafts: up to `most` tokens of a sequence in a step, which `drafter` guesses from its text.

    If `drafter` is None the decoder's small model writes them, if it is `Pruned` the model itself
    (`drafting.drafter`). `length` decides how many. Steps of `widths` different numbers of rows are compiled,
    and the smallest sufficient one runs. `before` is a drafting that is tried first, by a
    function of texts, of at most as many tokens. `times` are assumed step times until some are measured;
    None if no law uses them.
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
            raise ValueError(f"before: wanted a drafting by a function of texts, of most = {self.most} tokens")

    @property
    def pruned(self) -> Pruned | None:
        """The settings of self-drafting; None for other drafters."""
        return self.drafter if isinstance(self.drafter, Pruned) else None

    @property
    def laws(self) -> tuple[DraftLength, ...]:
        """The law of its own lengths and, if there is one, that of `before`."""
        return (self.length,) if self.before is None else (self.length, self.before.length)

    def started(self, most: Int[Array, ""], laws: tuple[DraftLength, ...], context: Int[Array, ""]) -> DraftState:
        """Return the state of a sequence whose request allows `most` drafted tokens a step, by the fitted `laws`.

        It has `context` tokens in the cache. A self-drafting model cannot draft at its first token, because it
        has no heavy blocks yet; it requests them if the law would draft at once.
        """
        law, *others = laws
        begun = law.by_past(started(self.length, most))
        if self.pruned is not None:
            length = law.length(begun, jnp.zeros(()), context)
            begun = replace(begun, length=jnp.minimum(length, most).astype(jnp.int32))
        if self.before is None:
            return begun
        return replace(begun, before=self.before.started(most, tuple(others), context))

    def widths(self, batch: int) -> tuple[int, ...]:
        """Return the numbers of rows a step may have: `batch`, plus each of `widths` drafted tokens.

        Self-drafted sequences of a batch use the same draft length, one of `lengths`.
        """
        if self.pruned is not None:
            return tuple(batch * (1 + length) for length in (0, *lengths(self.most)))
        return tuple(batch + drafted for drafted in widths(self.most, batch))

    def ahead(self, width: int, batch: int) -> int:
        """Return how many drafted tokens one sequence may have in a step of `width` rows."""
        return min(self.most, width // batch - 1 if self.pruned is not None else width - batch)

    def needed(self, batch: int, count: Int[Array | np.ndarray, "*s r"]) -> Int[Array | np.ndarray, "*s"]:
        """Return the smallest step width for `count` drafted tokens of every row."""
        return batch + (count.sum(axis=-1) if self.pruned is None else batch * count.max(axis=-1))


def widths(most: int, batch: int) -> tuple[int, ...]:
    """Return the numbers of drafted tokens for which steps of `batch` sequences, at most `most` each, are compiled.

    They are none; a short draft, unless the rows of the batch make a full one hardly more expensive; a full one, four,
    sixteen and so on; and the maximum. All widths cost the same to compile, and their load time grows with the square
    of their number.
    """
    drafted, some = {0, batch * most} | ({min(SHORT, most)} if batch <= most else set()), most
    while 2 * some <= batch * most:
        drafted.add(some)
        some *= 4
    return tuple(sorted(drafted))


def lengths(most: int) -> tuple[int, ...]:
    """Return the draft lengths for which steps are compiled if all sequences use the same: a few, and `most`."""
    return (*(length for length in (SHORT, 2 * SHORT) if length < most), most)


def by_acceptance(most: int, sequences: int, batch: int, drafter_cost: float = 0.0) -> AcceptanceLength:
    """Return the draft length law for `sequences` of a step's `batch`, each with at most `most` drafted tokens.

    It assumes equal draft lengths. A row costs a share of reading the weights (`Costs`), which a plain step does
    once for `batch` rows; a drafted token costs an extra `drafter_cost` of a plain step. A sequence whose
    drafts fail drafts again when that costs a hundredth of the steps since.
    """
    row = _costs().row
    cost = row * sequences / (1.0 + row * batch) + drafter_cost
    return AcceptanceLength(widths=tuple(w / sequences for w in widths(most, batch)[1:])).at(cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadSizes:
    """The reads of a step: bytes of `weights`, and of a `token` of one sequence in the cache, over all `layers`.

    Unless the rows of a sequence read its pages `together`, each of them reads them all.
    """

    weights: int
    token: int
    layers: int
    together: bool = True


def rough_times(batch: int, sizes: ReadSizes, passing: float = 0.0, share: float = 0.0) -> StepTimes:
    """Return assumed times of steps of `batch` sequences, in passes that read the weights once (`Costs`).

    A drafting pass takes `passing` of a plain step without a cache, and reads a `share` of the cache.
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
    """Return the draft length law of a self-drafting model, for steps of these times.

    It assumes that the `batch` sequences of a step have equal lengths, and equal draft lengths.
    """
    return RooflineLength(times=times.alike(batch, batch), widths=tuple(map(float, lengths(most))))


def _costs() -> Costs:
    return {"cpu": ON_CPUS, "gpu": ON_GPUS}.get(jax.default_backend(), ON_TPUS)


@pytree
class Drafts:
    """The first `count` of `token` are guesses at the tokens that follow the newest one of each row.

    `work` is the small model's for them, `own` the model's own; None for an idle model.
    `before` marks the rows whose guesses come from the drafter that is tried first; None without one.
    """

    token: Int[Array, "r t"]
    count: Int[Array, " r"]
    work: Work | None = None
    own: Work | None = None
    before: Bool[Array, " r"] | None = None


def lookup(text: Int[Array, "r n"], newest: Int[Array, " r"], most: int) -> Int[Array, "r t"]:
    """Return `most` guesses at what follows position `newest` of each text: what followed an earlier match.

    The match is the one whose last tokens, at most four, agree with the longest run of the newest ones, the
    latest of several. If fewer than `most` tokens follow it, they are repeated, as in a periodic text. If
    no two tokens match, there is no guess: -1. Prompt lookup: Saxena 2023.
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
    """Return `width` rows: the given ones, then every drafted token; with each row's end, and the row of each token.

    A row's end is the number of tokens of its slot in the cache after all are written. `at[i, j]` is the row of the
    j-th token of row i, 0 being the given one; if there is none, row i itself.
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
    all_rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)]), replace(rows, slot=slot), drafted)
    own = jnp.arange(num_rows, dtype=jnp.int32)
    rank = (num_rows + jnp.cumsum(wanted, dtype=jnp.int32) - 1).reshape(num_rows, most)
    at = jnp.concatenate([own[:, None], jnp.where(wanted.reshape(num_rows, most), rank, own[:, None])], axis=1)
    end = rows.place + 1 + drafts.count
    return all_rows, end[jnp.concatenate([own, row])], at


def allowed(
    run: Bool[Array, " r"], wanted: Int[Array, " r"], remaining: Int[Array, " r"], most: int
) -> Int[Array, " r"]:
    """Return how many tokens to draft: as `wanted`, but at most what a sequence with `remaining` tokens can accept."""
    return jnp.where(run, jnp.clip(jnp.minimum(wanted, remaining - 1), 0, most), 0)
