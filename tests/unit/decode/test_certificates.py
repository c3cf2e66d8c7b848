"""Certificates by brute force: over keys made to hurt, no query head leaves more of its mass unread than its tolerance.

Tens of thousands of query heads over a paged cache, their true masses in float64 from the keys as they are stored.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attend
from places import GOLDEN
from stored_tokens import LARGEST, as_stored

from et_jax.control import select
from et_jax.control.base import unpack_blocks
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.decode import cache as kv
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.decode.readers import SelectedOfLayer
from et_jax.decode.selection import blocks_of, view_of
from et_jax.decode.selection import select as choose
from et_jax.models.checkpoint import load
from et_jax.models.transformer import forward

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
        many = jax.tree.map(lambda x: jnp.full(ROWS, x), selector)  # numbers have a row each
        view = view_of(query, layer, None, blocks, tolerance, "xla", soft_cap)
        return choose(many, view, blocks), blocks.num_tokens

    return run


LAYERS = [(None, None), (21, None), (None, 2.0)]
CASES = [
    *itertools.product(("coded", "chord"), LAYERS, ("float32",)),
    ("coded", (None, None), "int8"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *itertools.product(("coded", "chord"), LAYERS, ("bfloat16",)),
            ("chord", (21, None), "float8_e4m3fn"),
            ("coded", (None, 2.0), "float8_e4m3fn"),
        )
    ),
]


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


def test_certificates_hold_under_the_sinks_that_a_model_has_in_its_weights():
    """Of its own queries, keys and values, through the pages layer by layer; what is told was read is a lower bound."""
    config, params = load(GOLDEN / "gpt_oss", "float32")
    tokens = jnp.asarray(np.load(GOLDEN / "gpt_oss" / "golden.npz")["tokens"])

    def noting(layer, q, k, v, memory, softmax):
        out, _ = dense_attend(config)(layer, q, k, v, None, softmax)
        return out, (*memory, (q, k, v, softmax))

    @jax.jit
    def run(params):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        with jax.default_matmul_precision("highest"):
            return forward(params, config, tokens, positions, noting, ())[1]

    rows = [(text, place) for text in range(len(tokens)) for place in range(9, tokens.shape[1], 2)]
    text, place = np.array(rows).T
    count, size, blocks = len(rows), 2, tokens.shape[1] // 2
    plant = Plant(model=config, page_size=size, backend="xla", scores_backend="xla")
    table = jnp.arange(1, count * blocks + 1, dtype=jnp.int32).reshape(count, blocks)
    length, one, zero = jnp.asarray(place + 1, jnp.int32), jnp.ones(count, jnp.int32), jnp.zeros(count, jnp.int32)
    chunk = Chunk(
        slot=None,
        table=table,
        token=zero[:, None],
        position=length - 1,
        start=length - 1,
        count=one,
        end=length,
    )
    closed, shrunk = 0, 0.0
    for layer, (q, k, v, softmax) in enumerate(run(params)):
        sinks = params.layers[layer].sinks
        np.testing.assert_array_equal(softmax.sink_logits, sinks)
        assert softmax.window == (8, None, 8)[layer]
        blank = kv.empty(1, config.num_kv_heads, config.head_dim, count * blocks + 1, size, jnp.float32, key_codes=True)
        cached = kv.write(blank.layers[0], k[text], v[text], table, zero, length)
        reader = SelectedOfLayer(
            tolerance=jnp.full(count, 0.3),
            fresh=jnp.ones(count, bool),
            last=jnp.zeros((count, config.num_kv_heads, 1), jnp.uint32),
            kept_mass=jnp.ones(count),
            selector=jax.tree.map(lambda x: jnp.full(count, x), select.Certified(select.coded_bounds)),
            min_context=None,
            mass=None,
            sensitivity=None,
            refresh_every=1,
            residual=False,
            noting=None,
            chooses=True,
        )
        _, notes = jax.jit(lambda *given, reader=reader: reader.read(plant, *given))(
            softmax, q[text, place][:, None], cached, None, chunk
        )
        query, key, sink = (np.asarray(x, np.float64) for x in (q[text, place], k[text], sinks))
        grouped = query.reshape(count, config.num_kv_heads, -1, config.head_dim)
        score = np.einsum("bkgd,btkd->bkgt", grouped, key) * softmax.scale
        at = np.arange(tokens.shape[1])
        visible = (at <= place[:, None]) & (at > place[:, None] - (softmax.window or 1 << 30))
        mass = np.where(visible[:, None, None], np.exp(score), 0.0)
        opened = np.repeat(np.asarray(unpack_blocks(notes.block_mask))[..., :blocks], size, axis=-1)[:, :, None]
        unread = np.where(opened, 0.0, mass).sum(-1)
        tokens_mass, own = mass.sum(-1), np.exp(sink).reshape(1, config.num_kv_heads, -1)
        share = unread / (tokens_mass + own)
        assert share.max() <= 0.3
        assert np.all(np.asarray(notes.looked.kept_mass) <= 1 - share.max((1, 2)) + 1e-6)
        closed += int((visible[:, None, None] & ~opened).sum())
        shrunk = max(shrunk, float((own / (tokens_mass + own)).max()))
    assert closed > 50 and shrunk > 0.5
