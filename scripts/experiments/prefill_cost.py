"""What reading fewer blocks of a prompt saves of the time of its prefill.

A stack of Llama-3-8B's shape, few layers of it, with random weights prefills a long prompt segment by segment: densely;
at shares of the blocks before each segment, listed head by head; and with half of the KV heads at 1/16 and half at 1/2,
beside all heads at 9/32, their mean, and at 1/2, the greatest: where work is the sum, it takes as long as the mean.
Cache write and choice of blocks are included.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from et_jax.control.budget import Budget, ConstantBudget, PromptNotes, begun, greatest
from et_jax.control.segment import Segment
from et_jax.decode import cache as kv
from et_jax.decode.budgeted import Budgeted
from et_jax.decode.chunk import Chunk
from et_jax.decode.extend import extend
from et_jax.decode.plant import Plant, PlantState
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.types import static, value
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.shapes import LLAMA_3_8B
from scripts.measuring.timing import Round, seconds

SHARES = {
    **{"all, listed": (1.0,), "1/2": (1 / 2,), "1/4": (1 / 4,), "1/8": (1 / 8,), "1/16": (1 / 16,), "9/32": (9 / 32,)},
    "half of the heads 1/16, half 1/2": (1 / 16, 1 / 2),
}
Carry = tuple[PlantState, PromptNotes]


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    tokens: int = setting(16_384, "tokens of the prompt", least=1, quick=128)
    layers: int = setting(1, "layers of the shape", least=1)
    segment: int = setting(512, "tokens of a segment", least=1, quick=64)
    page: int = setting(16, "tokens of a page", least=1)
    dtype: str = setting("bfloat16", "of weights and cache", choices=("bfloat16", "float32"))
    rounds: int = setting(5, "rounds in which all take turns", least=2, quick=2)


@value
class Shares(Budget):
    """Every KV head reads its own share of the visible blocks, those of greatest score."""

    of_heads: tuple[float, ...] = static(default=())

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        visible = jnp.sum(segment.visible).astype(jnp.float32)
        count = jnp.round(jnp.asarray(self.of_heads, jnp.float32) * visible).astype(jnp.int32)
        return greatest(segment.score, count, segment.visible), kept


class Prompt:
    """A prompt's prefill under a budget."""

    def __init__(self, settings: Settings, plant: Plant, budget: Budget) -> None:
        self.settings, self.plant, self.budget = settings, plant, budget

    def empty(self) -> Carry:
        """Return a cache of zeros and blank notes."""
        c, size = self.plant.model, self.settings.page
        cache = kv.empty(
            c.num_layers, c.num_kv_heads, c.head_dim, c.max_positions // size + 1, size, self.settings.dtype
        )
        notes = begun(self.budget, c.num_layers, c.num_kv_heads, probed=False)
        state = PlantState(cache=cache, num_cached=jnp.zeros(1, jnp.int32))
        return state, jax.tree.map(lambda x: x[None], notes)

    def chunk(self, tokens: Array, start: Array) -> Chunk:
        """Return a segment of the prompt."""
        zero, blocks = jnp.zeros(1, jnp.int32), self.plant.model.max_positions // self.settings.page
        count = zero + tokens.shape[1]
        place = {"position": zero + start, "start": zero + start, "count": count, "end": start + count}
        return Chunk(slot=zero, table=1 + jnp.arange(blocks, dtype=jnp.int32)[None], token=tokens, **place)

    def prefilled(self, params: Params, carry: Carry, tokens: Array, start: Array) -> tuple[Carry, Array]:
        """Return the cache after a segment, and its last logits."""
        state, notes = carry
        reader = Budgeted(budget=self.budget, last=jnp.zeros(1, bool), notes=notes)
        found, state, notes, _ = extend(self.plant, params, state, self.chunk(tokens, start), reader)
        return (state, notes), found[:, -1]

    def started(self, params: Params, tokens: Array) -> Round:
        """Return a round: the seconds of all segments, one after another."""
        run = jax.jit(self.prefilled, donate_argnums=1)

        def timed() -> dict[str, float]:
            carry = [jax.block_until_ready(self.empty())]

            def segments() -> Carry:
                for start in range(0, self.settings.tokens, self.settings.segment):
                    carry[0], _ = run(params, carry[0], tokens, jnp.int32(start))
                return carry[0]

            return {"seconds": seconds(segments)}

        return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group."""
    windows = (None,) * settings.layers
    sizes = {"num_layers": settings.layers, "windows": windows, "max_positions": settings.tokens, "vocab_size": 1024}
    model = dataclasses.replace(LLAMA_3_8B, **sizes)
    plant = Plant(model=model, page_size=settings.page, backend=pick(), scores_backend=pick())
    how = {"segment": settings.segment, "dense_until": 0}
    budgets: dict[str, Budget] = {"dense": ConstantBudget(segment=settings.segment, dense_layers=settings.layers)}
    for name, shares in SHARES.items():
        of_heads = tuple(np.resize(shares, model.num_kv_heads).tolist())
        budgets[name] = Shares(dense_layers=0, of_heads=of_heads, **how)
    params = initialise(model, jax.random.key(settings.seed), settings.dtype)
    tokens = jax.random.randint(jax.random.key(1), (1, settings.segment), 0, model.vocab_size)
    arms: dict[str, Callable[[], Round]] = {
        name: partial(Prompt(settings, plant, budget).started, params, tokens) for name, budget in budgets.items()
    }
    yield Group(arms=arms, baseline="dense", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="What does reading fewer blocks of a prompt save of the time of its prefill?",
    settings=Settings,
    groups=groups,
    figures={"seconds": Figure(header="seconds", against="ratio")},
    timed=True,
)
