"""Writes land where the table says; a full page is summarised by its own tokens, whatever lay there before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import LARGEST, as_stored

from et_jax.decode.attention import summaries
from et_jax.decode.cache import eight_bits, kv

HEADS, PAGES, SIZE, DIM = 2, 9, 4, 5
# Two slots that hold pages in no order, and one that holds none.
TABLE = np.asarray([[3, 7, 1, 5], [8, 2, 0, 0], [0, 0, 0, 0]], np.int32)

write = jax.jit(kv.write)
EIGHT_BITS = pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn], ids=["float32", "bfloat16", "int8", "fp8"]
)


def dirty(dtype, junk: float = np.nan) -> kv.LayerCache:
    """A layer whose every number, summaries included, is junk."""
    layer = kv.empty(1, HEADS, DIM, PAGES, SIZE, dtype, key_codes=True).layers[0]
    return jax.tree.map(lambda x: jnp.full_like(x, 77 if x.dtype.itemsize == 1 else junk), layer)


def tokens(rng, t: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values "b t k d" of the dtype of a cache, or those that one in 8 bits rounds."""
    in_8_bits = jnp.dtype(dtype).itemsize == 1
    k, v = (jnp.asarray(rng.normal(size=(3, t, HEADS, DIM)), jnp.float32 if in_8_bits else dtype) for _ in range(2))
    return k, v


def read(layer: kv.LayerCache) -> np.ndarray:
    """Every token of a layer as it is read."""
    pages = np.asarray(layer.pages.astype(jnp.float32))
    if layer.kv_scales is None:
        return pages
    return pages * np.repeat(np.asarray(layer.kv_scales), [DIM, pages.shape[-1] - DIM], axis=2).swapaxes(2, 3)


class Plain:
    """The cache as lists: what was stored, by slot and position."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.keys = [[] for _ in TABLE]
        self.values = [[] for _ in TABLE]

    def write(self, k, v, start, count):
        k, v = (as_stored(x, self.dtype) for x in (k, v))
        for b in range(len(TABLE)):
            for i in range(count[b]):
                assert start[b] + i == len(self.keys[b])
                self.keys[b].append(np.asarray(k[b, i], np.float64))
                self.values[b].append(np.asarray(v[b, i], np.float64))

    def check(self, layer: kv.LayerCache, untouched: kv.LayerCache, tolerance: float):
        """Every stored token is in its page, every full page has its summary, everything else is as it was."""
        pages, expected = read(layer), read(untouched).copy()
        full = set()
        for b, row in enumerate(TABLE):
            for position, (key, value) in enumerate(zip(self.keys[b], self.values[b], strict=True)):
                page = row[position // SIZE]
                token = np.concatenate([key, value], axis=-1)
                expected[:, page, position % SIZE] = np.pad(token, ((0, 0), (0, pages.shape[-1] - 2 * DIM)))
            for block in range(len(self.keys[b]) // SIZE):
                full.add(int(row[block]))
                own = slice(block * SIZE, (block + 1) * SIZE)
                key, value = np.stack(self.keys[b][own], axis=1), np.stack(self.values[b][own], axis=1)
                self.check_summary(layer.summary, row[block], key, value, tolerance)
                assert layer.key_codes is not None
                self.check_codes(layer.key_codes[:, row[block]], key)
        np.testing.assert_array_equal(pages, expected)
        others = sorted(set(range(PAGES)) - full)
        assert 0 in others
        for now, before in zip(jax.tree.leaves(layer.summary), jax.tree.leaves(untouched.summary), strict=True):
            one, other = (np.asarray(x[:, others], np.float32) for x in (now, before))
            np.testing.assert_array_equal(one, other)

    @staticmethod
    def check_summary(summary, page, key, value, tolerance):
        box, mean = np.asarray(summary.key_box[:, page], np.float64), np.asarray(summary.mean[:, page], np.float64)
        np.testing.assert_array_equal(box[:, :DIM], key.min(axis=1))
        np.testing.assert_array_equal(box[:, DIM : 2 * DIM], key.max(axis=1))
        np.testing.assert_allclose(mean[:, :DIM], key.mean(axis=1), atol=tolerance)
        np.testing.assert_allclose(mean[:, DIM : 2 * DIM], value.mean(axis=1), atol=tolerance)
        apart = np.linalg.norm(value - value.mean(axis=1, keepdims=True), axis=-1).max(axis=1)
        np.testing.assert_allclose(np.asarray(summary.value_radius[:, page], np.float64), apart, atol=tolerance)
        assert not box[:, 2 * DIM :].any() and not mean[:, 2 * DIM :].any()

    @staticmethod
    def check_codes(codes, key):
        """A key lies within half a step of its code."""
        low, scale = key.min(axis=1, keepdims=True), np.ptp(key, axis=1, keepdims=True) / 255
        codes = np.asarray(codes, np.float64).reshape(HEADS, SIZE, DIM)
        decoded = low + 128 * scale + scale * codes
        assert (np.abs(decoded - key) <= scale * (0.5 + 1e-4) + 1e-6).all()


@DTYPES
def test_chunks_and_appended_tokens_are_stored_and_summarised_page_by_page(dtype):
    """A prefill in chunks that begin and end inside pages, then token after token, slots at different places.

    The last chunk is wider than what is left of the tables.
    """
    chunks = [(8, [0, 0, 0], [3, 0, 0]), (8, [3, 0, 0], [8, 0, 0]), (8, [11, 0, 0], [0, 7, 0])]
    steps = [(1, [11 + i, 7 + min(i, 1), 0], [1, i == 0, 0]) for i in range(2)]
    rng, plain = np.random.default_rng(0), Plain(dtype)
    layer = untouched = dirty(dtype)
    for width, start, count in (*chunks, *steps, (8, [13, 8, 0], [3, 0, 0])):
        k, v = tokens(rng, width, dtype)
        layer = write(layer, k, v, *(jnp.asarray(x, jnp.int32) for x in (TABLE, start, count)))
        plain.write(k, v, start, count)
        plain.check(layer, untouched, tolerance=1e-6)


@EIGHT_BITS
def test_a_key_or_value_in_8_bits_is_near_by_the_steps_of_its_own_scale(dtype):
    """Whole numbers lie a half apart at most; floats of 3 bits of mantissa a sixteenth, or half their least."""
    x = np.random.default_rng(5).normal(size=(500, 64)) * np.exp(np.linspace(-20, 20, 500))[:, None]
    numbers, scales = eight_bits.quantized(jnp.asarray(x, jnp.float32), dtype)
    numbers, scales = np.asarray(numbers.astype(jnp.float32)), np.asarray(scales)[:, None]
    np.testing.assert_allclose(scales[:, 0], np.abs(x).max(1) / LARGEST[jnp.dtype(dtype).name], rtol=1e-6)
    off = np.abs(numbers * scales - x)
    allowed = scales / 2 if dtype == jnp.int8 else np.maximum(np.abs(x) / 16, scales * 2.0**-10)
    assert (off <= 1.00001 * allowed).all() and off.max() > 0
    nothing, scale = eight_bits.quantized(jnp.zeros((1, 4)), dtype)
    assert not np.asarray(nothing.astype(jnp.float32)).any() and not np.asarray(scale).any()


@EIGHT_BITS
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_fault_in_8_bits_is_in_the_scale_alone(dtype, fault):
    numbers, scale = eight_bits.quantized(jnp.asarray([[1.0, fault, 2.0], [1.0, 0.0, 2.0]]), dtype)
    assert np.isfinite(np.asarray(numbers.astype(jnp.float32))).all()
    assert not np.isfinite(scale[0]) and np.isfinite(scale[1])


@EIGHT_BITS
@pytest.mark.parametrize(
    ("width", "start", "count"),
    [(1, [4, 3, 0], [1, 1, 0]), (8, [1, 2, 0], [8, 6, 0]), (7, [9, 0, 0], [7, 3, 0]), (3, [2, 4, 7], [2, 3, 2])],
    ids=["a token each", "over pages", "to the end of the table", "rows of one slot"],
)
def test_page_by_page_is_stored_what_is_stored_token_by_token(dtype, width, start, count, monkeypatch):
    """As for a TPU, into a layer full of other numbers."""
    k, v = tokens(np.random.default_rng(7), width, dtype)
    table = np.asarray([TABLE[0]] * 3) if count[2] else TABLE
    given = [jnp.asarray(x, jnp.int32) for x in (table, start, count, [9] * 3 if count[2] else np.add(start, count))]
    before = dirty(dtype, 3.0)
    expected = write(before, k, v, *given)
    monkeypatch.setattr(kv, "platform", lambda: "tpu")
    got = kv.write(before, k, v, *given)
    for name in ("pages", "kv_scales"):
        one, other = (np.asarray(getattr(layer, name), np.float32) for layer in (got, expected))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("widths", [(6,), ()], ids=["box", "radius"])
def test_page_by_page_is_summarised_what_is_summarised_at_once(widths):
    """As for a TPU; the page past the end is dropped."""
    rng = np.random.default_rng(8)
    pool, new = (jnp.asarray(rng.normal(size=(HEADS, *size, *widths)), jnp.float32) for size in ((PAGES,), (2, 2)))
    page = np.asarray([[3, PAGES], [0, 5]], np.int32)
    expected = np.array(pool)
    for place in ((0, 0), (1, 0), (1, 1)):
        expected[:, page[place]] = new[:, *place]
    np.testing.assert_array_equal(summaries.in_turn(pool, jnp.asarray(page), new), expected)


@pytest.mark.parametrize(
    ("dtype", "chips", "boxes"),
    [(jnp.bfloat16, 1, jnp.bfloat16), (jnp.bfloat16, HEADS, jnp.float32), (jnp.int8, 1, jnp.float32)],
)
def test_boxes_of_pages_that_a_word_would_pair_are_in_float32(dtype, chips, boxes):
    assert kv.empty(1, HEADS, DIM, PAGES, SIZE, dtype, chips=chips).layers[0].summaries.key_box.dtype == boxes


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "out of order"])
def test_rows_of_one_sequence_may_share_a_page(order):
    """Two tokens and three, of which one is in the first one's page: its summary speaks of both, in any order."""
    k, v = tokens(np.random.default_rng(4), 3, jnp.float32)
    table, start, count = (np.asarray(x, np.int32) for x in ([TABLE[0]] * 2, [SIZE - 3, SIZE - 1], [2, 3]))
    first = dirty(jnp.float32, junk=0.0)
    once = write(first, k[:1], v[:1], table[:1], start[:1], count[:1])
    twice = write(once, k[1:2], v[1:2], table[1:], start[1:], count[1:])
    at = np.asarray(order)
    end = jnp.full(2, SIZE + 2, jnp.int32)
    together = write(first, k[at], v[at], table[at], start[at], count[at], end)
    for got, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@DTYPES
def test_pages_that_are_moved_take_their_summaries_along_and_leave_the_rest(dtype):
    rng = np.random.default_rng(3)
    empty = kv.empty(2, HEADS, DIM, PAGES, SIZE, dtype, key_codes=True, surprisals=True)
    cache = jax.tree.map(lambda x: jnp.asarray(100 * rng.normal(size=x.shape), x.dtype), empty)
    taken = jax.jit(kv.take_pages)(cache, jnp.asarray([4, 2, 1], jnp.int32))
    after = jax.jit(kv.put_pages)(cache, jnp.asarray([6, PAGES, 0], jnp.int32), taken)  # the second is left out
    assert cache.surprisal is not None and after.surprisal is not None
    moved = cache.surprisal.at[6].set(cache.surprisal[4]).at[0].set(cache.surprisal[1])
    np.testing.assert_array_equal(after.surprisal, moved)
    assert len(jax.tree.leaves(after.layers)) == (12 if jnp.dtype(dtype).itemsize == 1 else 10)
    for old, new in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True):
        expected = np.asarray(old).copy()
        expected[:, 6], expected[:, 0] = expected[:, 4], expected[:, 1]
        np.testing.assert_array_equal(np.asarray(new), expected)


@pytest.mark.parametrize(
    ("head_dim", "width", "asked", "held"),
    [(1, 128, 7, 7), (64, 128, 8, 9), (65, 256, 9, 9), (80, 256, 16, 17), (128, 256, 63, 63), (256, 512, 64, 65)],
)
def test_a_token_fills_whole_lanes_and_no_pool_is_a_multiple_of_eight_pages(head_dim, width, asked, held):
    """A TPU would copy the summaries of such a pool before it scores them."""
    assert kv.token_width(head_dim) == width
    cache = kv.empty(1, 2, head_dim, asked, 1, jnp.float32, key_codes=True, surprisals=True)
    arrays = jax.tree.leaves(cache.layers)
    assert cache.layers[0].pages.shape[-1] == width and len(arrays) == 5
    assert {array.shape[1] for array in arrays} == {held}
    assert cache.surprisal is not None and cache.surprisal.shape[0] == held
