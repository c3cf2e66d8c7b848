"""Random blocks of one KV head, for tests of selectors: what a selector sees, and the keys and values behind it."""

import dataclasses
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from et_jax.control.bounds import Interval
from et_jax.control.view import BlockView, tolerating
from et_jax.types import replace

FAMILIES = ("random", "ties", "corners", "needle", "single")
NUM_BLOCKS, PAGE_SIZE, WIDTH, GROUP = 10, 4, 6, 2


@dataclasses.dataclass(frozen=True)
class Blocks:
    """One KV head's blocks: the view that a selector sees, and the full keys and values behind it.

    `key` and `value` are "n s d" and contain `num_tokens` true tokens a block; the rest, and every summary
    of an empty block, is NaN; its scores are -inf. `log_mass` "g n" is each block's log-sum-exp, in float64.
    """

    view: BlockView
    key: np.ndarray
    value: np.ndarray
    log_mass: np.ndarray

    def tolerating(self, tolerance: float, **fields) -> BlockView:
        """Return the view with another tolerance, of the sequence and every head."""
        return replace(tolerating(self.view, jnp.float32(tolerance)), **fields)

    def of_query(self, head: int, tolerance: float) -> BlockView:
        """Return the view of a group of one query, with a tolerance of its own."""
        given, one = self.tolerating(tolerance), slice(head, head + 1)
        score = Interval(low=given.score.low[one], high=given.score.high[one])
        each = {name: getattr(given, name)[one] for name in ("query", "middle", "head_tolerance", "tail_log_mass")}
        return replace(given, score=score, **each)

    @property
    def held(self) -> np.ndarray:
        """Return which blocks contain tokens."""
        return np.asarray(self.view.num_tokens) > 0

    @property
    def tail(self) -> np.ndarray:
        """Return which block the sequence ends in."""
        return np.arange(len(self.held)) == self.held.sum() - 1

    @property
    def mean_log_mass(self) -> np.ndarray:
        """Return each block's log-sum-exp were its keys all their mean, in float64, but for the tail; -inf if empty."""
        score = np.asarray(self.view.query, np.float64) @ np.asarray(self.view.key_mean, np.float64).T
        with np.errstate(divide="ignore"):
            log_mass = np.where(self.held, np.log(np.asarray(self.view.num_tokens)) + score, -np.inf)
        return np.where(self.tail, self.log_mass, log_mass)

    @property
    def mean_shares(self) -> np.ndarray:
        """Return the shares of mass that `mean_log_mass` says."""
        weight = np.exp(self.mean_log_mass)
        return weight / weight.sum(-1, keepdims=True)

    def assert_fewest(self, opened, price: np.ndarray) -> None:
        """Assert that the blocks opened are the fewest that leave no head more than the tolerance of its price "g n".

        The tail is read in any case. Ties open together.
        """
        tolerance = float(self.view.tolerance)
        opened, slack, most = np.asarray(opened), 2e-6 + 1e-5 * tolerance, self.tail
        price = np.where(self.tail, 0.0, price)
        assert np.all(np.where(opened, 0.0, price).sum(-1) <= tolerance + slack)
        for row in price:
            cuts = (np.inf, *np.sort(row)[::-1])
            cut = next((cut for cut in cuts if row[row < cut].sum() <= tolerance - slack), 0.0)
            most = most | (row >= cut * (1 - 1e-5))
        assert not np.any(opened & ~most)


def blocks(seed: int, family: str = "random", spread: float = 4.0, tolerance: float = 0.1) -> Blocks:
    """Return blocks of a family of shapes, drawn by `seed`; scores reach about +-`spread`."""
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
    return seen(query, key, value, num_tokens, tolerance)


def seen(query: np.ndarray, key: np.ndarray, value: np.ndarray, num_tokens: np.ndarray, tolerance: float) -> Blocks:
    """Return the blocks of keys and values "n s d" in float32 as queries "g d" see the first tokens of each."""
    page_size, held = key.shape[1], int((num_tokens > 0).sum())
    absent = np.arange(page_size) >= num_tokens[:, None]
    key[absent], value[absent] = np.nan, np.nan
    score = np.where(absent, -np.inf, np.einsum("gd,nsd->gns", query.astype(np.float64), key))
    log_mass = np.logaddexp.reduce(score, axis=-1)
    exact_key, exact_value = key.astype(np.float64), value.astype(np.float64)
    with warnings.catch_warnings(action="ignore"):  # means over the empty blocks
        middle = np.nanmean(exact_value, axis=1)
        key_min, key_max, key_mean = np.nanmin(key, axis=1), np.nanmax(key, axis=1), np.nanmean(exact_key, axis=1)
        ends = query.astype(np.float64)[:, None] * np.stack([key_min, key_max])[:, None]  # least or greatest, g, n, d
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
            start=jnp.arange(len(key), dtype=jnp.int32) * page_size,
            num_tokens=jnp.asarray(num_tokens, jnp.int32),
            length=jnp.int32((held - 1) * page_size + num_tokens[held - 1]),
            tolerance=jnp.float32(tolerance),
            head_tolerance=jnp.full(len(query), tolerance, jnp.float32),
            tail_log_mass=jnp.asarray(log_mass[:, held - 1], jnp.float32),
        )
    return Blocks(view=view, key=key, value=value, log_mass=log_mass)


def drawn(
    *, families: Sequence[str] = FAMILIES, spread: float = 40.0, tolerance: tuple[float, float] = (0.1, 0.1)
) -> st.SearchStrategy[Blocks]:
    """Return a strategy for blocks, of scores up to about +-`spread` and a tolerance between two."""
    family = st.sampled_from(families)
    return st.builds(blocks, st.integers(0, 100_000), family, st.floats(0.01, spread), st.floats(*tolerance))
