"""Certificates by brute force: over keys made to hurt, no query head leaves more of its mass unread than its tolerance.

Tens of thousands of query heads over a paged cache, their true masses in float64 from the keys as they are stored.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import LARGEST, as_stored

from et_jax.control import select
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.decode.attention.blocks import LayerKind, blocks_of
from et_jax.decode.attention.selection import selection_of, selector_inputs
from et_jax.decode.cache import kv
from et_jax.pallas.per_head import PerRow, per_head

pytestmark = pytest.mark.usefixtures("hardly_optimised")

ROWS, KV_HEADS, GROUP, DIM, PAGE, BLOCKS = 48, 2, 3, 8, 4, 16
DRAWS = 10  # of every case, of 288 query heads each
SLOPE = 0.8
FAMILIES = ("random", "corners", "needle", "alike", "far")


def drawn(rng: np.random.Generator, family: str) -> tuple[np.ndarray, np.ndarray]:
    """Return queries "b k g d", scaled, and keys "b t k d" of a family that is hard to bound."""
    tokens = BLOCKS * PAGE
    query = rng.normal(size=(ROWS, KV_HEADS, GROUP, DIM))
    key = rng.normal(size=(ROWS, tokens, KV_HEADS, DIM))
    if family == "corners":  # keys at the corners of their box, where its bounds are widest
        key = np.sign(key) * rng.uniform(0.5, 3.0, size=(ROWS, 1, KV_HEADS, DIM))
    elif family == "needle":  # one key in a block answers the first query, all others turn away from it
        key -= 0.5 * query[:, None, :, 0]
        at = rng.integers(tokens, size=ROWS)
        key[np.arange(ROWS), at] = 4 * query[:, :, 0]
    elif family == "alike":  # differences near what 8 bits tell apart
        key = key[:, :1] + 1e-2 * key
    elif family == "far":  # one channel far larger than the others, which is what sets a code's step
        key[..., 0] *= 100.0
        query[..., 0] /= 50.0
    spread = rng.choice([0.1, 1.0, 5.0, 20.0], size=(ROWS, 1, 1, 1))
    return query * spread / DIM**0.5, key


@functools.cache
def chosen(bounds: str, window: int | None, soft_cap: float | None):
    """A function from queries, keys, lengths and tolerances to the selection and the keys as stored."""
    rule = AttentionEntropy(SLOPE)
    selector = select.PerHead(select.Certified(getattr(select, f"{bounds}_bounds")), rule)
    coded = bounds == "coded"

    @functools.partial(jax.jit, static_argnames="dtype")
    def run(query, key, length, tolerance, dtype):
        cache = kv.empty(1, KV_HEADS, DIM, ROWS * BLOCKS + 1, PAGE, dtype, key_codes=coded)
        table = jnp.arange(1, ROWS * BLOCKS + 1, dtype=jnp.int32).reshape(ROWS, BLOCKS)
        key = key.astype(dtype) if dtype not in LARGEST else key
        layer = kv.write(cache.layers[0], key, key, table, jnp.zeros(ROWS, jnp.int32), length)
        blocks = blocks_of(table, length, PAGE, window)
        many = jax.tree.map(lambda x: PerRow(array=jnp.full(ROWS, x)), selector)  # numbers have a row each
        kind = LayerKind(page_size=PAGE, window=window, soft_cap=soft_cap)
        inputs = selector_inputs(query, layer, None, blocks, tolerance, "xla", kind)
        return per_head(functools.partial(selection_of, kind, None), many, inputs), blocks.num_tokens

    return run


LAYERS = [(None, None), (21, None), (None, 2.0)]
SLOW = [
    *itertools.product(("coded", "chord"), LAYERS, ("bfloat16",)),
    ("chord", (21, None), "float8_e4m3fn"),
    ("coded", (None, 2.0), "float8_e4m3fn"),
]
CASES = [*itertools.product(("coded", "chord"), LAYERS, ("float32",)), ("coded", (None, None), "int8")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("bounds", "of_layer", "dtype"), CASES)
def test_no_head_leaves_more_unread_than_its_own_tolerance(bounds, of_layer, dtype):
    """Nor where a sink takes a part of the mass: what is unread is then a smaller share."""
    window, soft_cap = of_layer
    rng = np.random.default_rng([len(bounds), window or 0, len(dtype)])
    worst, closed = 0.0, 0
    for number in range(DRAWS):
        query, key = drawn(rng, FAMILIES[number % len(FAMILIES)])
        length = rng.integers(1, BLOCKS * PAGE + 1, size=ROWS)
        tolerance = np.exp(rng.uniform(np.log(1e-3), np.log(0.9), size=ROWS)).astype(np.float32)
        given = np.float32(query), np.float32(key), np.int32(length), tolerance
        selection, num_tokens = chosen(bounds, window, soft_cap)(*map(jnp.asarray, given), dtype)
        opened, estimate = np.asarray(selection.opened), np.asarray(selection.estimate, np.float64)

        stored = np.asarray(as_stored(jnp.asarray(given[1]), dtype)).astype(np.float64)
        score = np.einsum("bkgd,btkd->bkgt", given[0].astype(np.float64), stored)
        score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
        position = np.arange(BLOCKS * PAGE)
        visible = (position < length[:, None]) & (position >= length[:, None] - (window or BLOCKS * PAGE))
        score = np.where(visible[:, None, None], score, -np.inf)
        log_share = score - np.logaddexp.reduce(score, axis=-1, keepdims=True)
        share = np.exp(log_share).reshape(*score.shape[:3], BLOCKS, PAGE).sum(-1)
        unread = np.where(opened[:, :, None], 0.0, share).sum(-1)
        sink = rng.normal(size=(KV_HEADS, GROUP))
        seen_mass = np.logaddexp.reduce(score, axis=-1)
        with_sink = unread * np.exp(seen_mass - np.logaddexp(seen_mass, sink))

        held = np.asarray(num_tokens)[:, None, None] > 0
        guess = np.where(held, estimate, -np.inf)
        guess -= np.maximum(np.logaddexp.reduce(guess, axis=-1, keepdims=True), -1e300)
        entropy = -(np.exp(guess) * np.where(held, guess, 0.0)).sum(-1) / np.log1p(np.maximum(held.sum(-1), 1))
        own = tolerance[:, None, None] * np.exp(SLOPE * (entropy - 1.0))
        assert np.all(own <= tolerance[:, None, None])
        worst = max(worst, float((unread / own).max()), float((with_sink / own).max()))
        closed += int((visible.reshape(ROWS, BLOCKS, PAGE).any(-1)[:, None] & ~opened).sum())
    assert closed > 25
    assert worst <= 1.0
