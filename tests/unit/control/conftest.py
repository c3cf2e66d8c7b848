"""Rows for laws: signals and states with every field filled, a law run over many tokens, blocks for selectors."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.base import ControlState, Signals, as_value, updated
from et_jax.control.bounds import Interval
from et_jax.control.view import BlockView, tolerating
from et_jax.types import replace

WHOLE = {"blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "pages_held"}


@pytest.fixture(scope="session")
def signals():
    """Return a function that fills the signals it is not given with zeros, of one common shape."""

    def build(**fields) -> Signals:
        shape = np.broadcast_shapes(*(np.shape(value) for value in fields.values()))
        return Signals(
            **{
                field.name: jnp.broadcast_to(
                    jnp.asarray(fields.get(field.name, 0), jnp.int32 if field.name in WHOLE else jnp.float32), shape
                )
                for field in dataclasses.fields(Signals)
            }
        )

    return build


@pytest.fixture(scope="session")
def state():
    """Return a function that gives the state of new sequences, as `law` starts them."""

    def build(law=None, shape=(), **fields) -> ControlState:
        zero = jnp.zeros(shape, jnp.float32)
        start = ControlState(
            entropy=zero,
            entropic_time=zero,
            total_cost=zero,
            temperature=zero + 1.0,
            surprisal_cap=zero + jnp.inf,
            tolerance=zero,
            priority=zero,
            wait=jnp.zeros(shape, jnp.int32),
            block_mask=jnp.zeros((*shape, 1, 1, 1), jnp.uint32),
            notes={},
        )
        fields = {
            name: jnp.broadcast_to(jnp.asarray(value, getattr(start, name).dtype), shape)
            for name, value in fields.items()
        }
        start = replace(start, **fields)
        return start if law is None else law.init(start)

    return build


@pytest.fixture(scope="session")
def run():
    """Return a function that runs a law over signals with a leading axis of tokens: every state, in order."""

    @jax.jit
    def over(law, start: ControlState, seen: Signals) -> ControlState:
        return jax.lax.scan(lambda state, one: (updated(law, one, state),) * 2, start, seen)[1]

    return lambda law, start, seen: over(as_value(law), start, seen)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """One KV head's blocks, whole and summarised: what a selector may not see beside what it does.

    `key` and `value` are "n s d" and hold `num_tokens` true tokens a block; the rest, and every summary
    of an empty block, is NaN; its scores are -inf. `log_mass` "g n" is each block's log-sum-exp, in float64.
    """

    view: BlockView
    key: np.ndarray
    value: np.ndarray
    log_mass: np.ndarray

    def tolerating(self, tolerance: float, **fields) -> BlockView:
        """Return the view with another tolerance, of the sequence and every head."""
        return replace(tolerating(self.view, jnp.float32(tolerance)), **fields)

    def of_first_query(self, tolerance: float | None = None) -> BlockView:
        """Return the view of a group of one query, the first."""
        given = self.view if tolerance is None else self.tolerating(tolerance)
        score = Interval(low=given.score.low[:1], high=given.score.high[:1])
        each = {name: getattr(given, name)[:1] for name in ("query", "middle", "head_tolerance", "tail_log_mass")}
        return replace(given, score=score, **each)

    def tail(self) -> np.ndarray:
        """Return which block the sequence ends in."""
        held = np.asarray(self.view.num_tokens) > 0
        return np.arange(len(held)) == held.sum() - 1

    def unread(self, opened) -> np.ndarray:
        """Return the share of each query head's mass in the blocks not opened."""
        weight = np.exp(self.log_mass - self.log_mass.max(-1, keepdims=True))
        return (weight * ~np.asarray(opened)).sum(-1) / weight.sum(-1)


NUM_BLOCKS, PAGE_SIZE, WIDTH, GROUP = 10, 4, 6, 2


@pytest.fixture(scope="session")
def blocks():
    """Return a function that draws blocks of a family of shapes; scores reach about +-`spread`."""

    def draw(seed: int, family: str = "random", spread: float = 4.0, tolerance: float = 0.1) -> Blocks:
        rng = np.random.default_rng(seed)
        shape = NUM_BLOCKS, PAGE_SIZE, WIDTH
        key, value = rng.normal(size=shape), rng.normal(size=shape)
        query = rng.normal(size=(GROUP, WIDTH))
        num_tokens = np.full(NUM_BLOCKS, PAGE_SIZE)
        held = rng.integers(1, NUM_BLOCKS + 1)
        num_tokens[held - 1] = rng.integers(1, PAGE_SIZE + 1)
        num_tokens[held:] = 0
        if family == "ties":
            key = np.repeat(np.repeat(key[:2, :1], NUM_BLOCKS // 2, axis=0), PAGE_SIZE, axis=1)
        elif family == "corners":
            key = np.sign(key) * rng.uniform(0.1, 2.0, size=(NUM_BLOCKS, 1, WIDTH))
        elif family == "needle":
            key[rng.integers(held), 0] = 6 * query[0]
        elif family == "single":
            num_tokens = np.minimum(num_tokens, 1)
        key, value = key.astype(np.float32), value.astype(np.float32)
        query = (query * spread / np.abs(key.astype(np.float64) @ query.T).max()).astype(np.float32)
        absent = np.arange(PAGE_SIZE) >= num_tokens[:, None]
        key[absent], value[absent] = np.nan, np.nan
        score = np.where(absent, -np.inf, np.einsum("gd,nsd->gns", query.astype(np.float64), key))
        log_mass = np.logaddexp.reduce(score, axis=-1)
        exact_key, exact_value = key.astype(np.float64), value.astype(np.float64)
        with warnings.catch_warnings(action="ignore"):  # means over the empty blocks
            middle = np.nanmean(exact_value, axis=1)
            key_min, key_max, key_mean = np.nanmin(key, axis=1), np.nanmax(key, axis=1), np.nanmean(exact_key, axis=1)
            ends = (
                query.astype(np.float64)[:, None] * np.stack([key_min, key_max])[:, None]
            )  # least or greatest, g, n, d
            scores = (ends.min(0).sum(-1), ends.max(0).sum(-1), query.astype(np.float64) @ key_mean.T)
            low, high, of_mean = (jnp.asarray(np.where(num_tokens > 0, x, -np.inf), jnp.float32) for x in scores)
            view = BlockView(
                query=jnp.asarray(query),
                score=Interval(low=low, high=high),
                middle=of_mean,
                key_min=jnp.asarray(key_min),
                key_max=jnp.asarray(key_max),
                key_mean=jnp.asarray(key_mean, jnp.float32),
                value_mean=jnp.asarray(middle, jnp.float32),
                value_radius=jnp.asarray(
                    np.nanmax(np.linalg.norm(exact_value - middle[:, None], axis=-1), axis=1), jnp.float32
                ),
                start=jnp.arange(NUM_BLOCKS, dtype=jnp.int32) * PAGE_SIZE,
                num_tokens=jnp.asarray(num_tokens, jnp.int32),
                length=jnp.int32((held - 1) * PAGE_SIZE + num_tokens[held - 1]),
                tolerance=jnp.float32(tolerance),
                head_tolerance=jnp.full(GROUP, tolerance, jnp.float32),
                tail_log_mass=jnp.asarray(log_mass[:, held - 1], jnp.float32),
            )
        return Blocks(view=view, key=key, value=value, log_mass=log_mass)

    return draw
