"""Blocks of a sequence: which a query may see, their shares of the mass, and the residual for those left unread."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL

from et_jax.control.base import pack_blocks
from et_jax.control.select import ActiveSet, Certified, Guarded, Quest, SinksWindow, chord_bounds
from et_jax.decode import extend, once
from et_jax.decode.attention import attended, block_sparse, selection
from et_jax.decode.attention import blocks as blocks_module
from et_jax.decode.attention.attended import AttendedMass, attended_mass, in_units_read, with_residual
from et_jax.decode.attention.block_sparse import BlockSparseLayer
from et_jax.decode.attention.blocks import LayerKind, blocks_of, places_of
from et_jax.decode.attention.readers import FullAttentionLayer
from et_jax.decode.attention.selection import SelectedBlocks
from et_jax.decode.cache import kv
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.models.layers import rotate
from et_jax.pallas.add_residual import gpu as add_residual
from et_jax.pallas.per_head import api, gpu, pieces, tpu, traced
from et_jax.pallas.rotate_store import gpu as rotate_store
from et_jax.softmax import Softmax
from et_jax.types import replace

PAGE, CAPACITY = 4, 6


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 24])
def test_blocks_are_those_of_the_positions_that_are_seen(window):
    lengths = np.arange(PAGE * CAPACITY + 1)
    table = jnp.zeros((len(lengths), CAPACITY), jnp.int32)
    blocks = blocks_of(table, jnp.asarray(lengths, jnp.int32), PAGE, window)
    position = np.arange(PAGE * CAPACITY)
    held = position < lengths[:, None]
    seen = held & (position >= lengths[:, None] - (window or len(position)))
    held, seen = (x.reshape(len(lengths), CAPACITY, PAGE) for x in (held, seen))
    newest = (position == lengths[:, None] - 1).reshape(held.shape).any(axis=-1)
    cut = seen.any(axis=-1) & (held & ~seen).any(axis=-1)  # its summary speaks of tokens that are not seen
    np.testing.assert_array_equal(blocks.readable, seen.any(axis=-1))
    np.testing.assert_array_equal(blocks.certain, newest | cut)
    whole = held.sum(axis=-1) * seen.any(axis=-1) * ~cut
    np.testing.assert_array_equal(np.where(blocks.readable, blocks.num_tokens, 0), whole)


# Shares of attention mass from one token to the next, against sums in NumPy.

TABLE = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
BLOCKS = blocks_of(TABLE, jnp.asarray([23, 9], jnp.int32), PAGE, None)  # six blocks, and three
OPENED = np.zeros((2, 2, 7), bool)
OPENED[0, 0, [0, 2, 5]], OPENED[0, 1, [4, 5]], OPENED[1, :, [0, 2]] = True, True, True


def listed(log_mass):
    """The log masses of the opened blocks in ascending order, then padding, as kernels give them."""
    found = np.full(log_mass.shape, -np.inf, np.float32)
    for row, head in np.ndindex(OPENED.shape[:2]):
        read = np.flatnonzero(OPENED[row, head])
        found[row, head, :, : len(read)] = log_mass[row, head][:, read]
    return found


def read_after(opened, estimate, blocks, by_list, residual=False, **shares) -> AttendedMass:
    """The masses after attention over the opened blocks, by an estimate of every block."""
    opened = jnp.asarray(opened)
    chosen = SelectedBlocks(
        mask=pack_blocks(opened),
        listed=opened,
        count=jnp.sum(opened, axis=-1),
        estimate=jnp.asarray(estimate, jnp.float32),
        upper=None,
        entropy=jnp.zeros(estimate.shape[:-1]),
        place=jnp.maximum(jnp.cumsum(opened, axis=-1) - 1, 0),
        **shares,
    )
    return attended_mass(
        chosen, blocks.length, jnp.asarray(by_list), None, LayerKind(page_size=PAGE, window=None), residual
    )


def log_of(share):
    return np.log(np.maximum(share, 1e-30))


def test_what_was_not_read_keeps_its_share_and_what_was_has_that_of_its_keys():
    """Of true log masses "b k g n" of every block, and shares that were known before."""
    held = np.broadcast_to(np.asarray(BLOCKS.readable)[:, None, None], (2, 2, 3, 7))
    opened = np.broadcast_to(OPENED[:, :, None], held.shape)
    log_mass = np.where(held, np.random.default_rng(0).normal(size=held.shape) + 40.0, -np.inf)
    share = np.exp(log_mass - np.logaddexp.reduce(log_mass, axis=-1, keepdims=True))
    read = listed(log_mass)
    log_read = np.logaddexp.reduce(read, axis=-1)
    given = jnp.asarray(log_of(share), jnp.float32), jnp.asarray((held & ~opened)[:, :, 0]), jnp.asarray(log_read)
    guessed = np.asarray(jax.vmap(jax.vmap(in_units_read))(*given))
    right = np.where(held & ~opened, share, 0.0).sum(-1) < 0.5  # of more than half, half is taken for unread
    assert 0 < right.mean() < 1
    np.testing.assert_allclose(guessed[right][held[right]], log_mass[right][held[right]], rtol=1e-5)
    after = np.asarray(read_after(OPENED, log_of(share), BLOCKS, read, shares=True).mass)
    np.testing.assert_allclose(after[right][held[right]], share[right][held[right]], rtol=1e-4)
    assert np.all(after[~held] == 1.0)
    np.testing.assert_allclose(np.where(held, after, 0.0).sum(-1), 1.0, rtol=1e-5)
    # a share that was wrong is put right by reading
    wrong = np.where(opened, 0.3 * share[..., ::-1], 1e-6)
    after = np.asarray(read_after(OPENED, log_of(wrong), BLOCKS, read, shares=True).mass)
    np.testing.assert_allclose(after[opened], np.exp(log_mass - log_read[..., None])[opened], rtol=1e-4)


# The residual, under caps and sinks too.

ROWS, TOKENS, ROW_LENGTHS = 3, 12, np.asarray([12, 7, 9], np.int32)
PLANT = Plant(model=MODEL, page_size=1, backend="xla", scores_backend="xla")
EVERY_BLOCK = FullAttentionLayer(skipped=None, mass=None, recorded_rows=None)


def read(reader, softmax: Softmax, depth: int = 1):
    """Attention of one token a row to random keys and values, and what was read."""
    rng, c = np.random.default_rng(0), MODEL
    table = jnp.arange(1, ROWS * TOKENS + 1, dtype=jnp.int32).reshape(ROWS, TOKENS)
    key, value = (jnp.asarray(rng.normal(size=(ROWS, TOKENS, c.num_kv_heads, c.head_dim)), jnp.float32) for _ in "kv")
    length = jnp.asarray(ROW_LENGTHS)
    blank = kv.empty(1, c.num_kv_heads, c.head_dim, ROWS * TOKENS + 1, 1, jnp.float32).layers[0]
    cached = kv.write(blank, key, value, table, jnp.zeros(ROWS, jnp.int32), length)
    query = jnp.asarray(3 * rng.normal(size=(ROWS, 1, c.num_heads, c.head_dim)), jnp.float32)
    one = jnp.ones(ROWS, jnp.int32)
    token, start = jnp.zeros((ROWS, 1), jnp.int32), length - 1
    chunk = Chunk(slot=None, table=table, token=token, position=start, start=start, count=one, end=length)
    given = query.reshape(ROWS, 1, c.num_kv_heads, -1, c.head_dim)
    if depth > 1:  # the layer is the last of several in a pool, and the queries of each KV head are padded
        cached = jax.tree.map(lambda x: jnp.concatenate([jnp.full_like(x, jnp.nan)] * (depth - 1) + [x], 1), cached)
        cached, turn = replace(cached, depth=depth), jnp.int32(depth - 1)
        places = {"own_table": table, "turn": turn, "places": places_of(chunk, 1)}
        chunk = replace(chunk, table=cached.numbers(table, turn), **places)
        given = jnp.pad(given, ((0, 0), (0, 0), (0, 0), (0, 3), (0, 0)), constant_values=jnp.nan)
    out, notes = reader.read(PLANT, softmax, given.reshape(ROWS, 1, -1, c.head_dim), cached, None, chunk)
    return np.asarray(out), notes


def pruned(selector, residual: bool = False) -> BlockSparseLayer:
    off = dict.fromkeys(("min_context", "mass", "sensitivity", "refresh", "recorded_rows"))
    return BlockSparseLayer(
        tolerance=jnp.full(ROWS, 0.3),
        last=jnp.zeros((ROWS, MODEL.num_kv_heads, 1), jnp.uint32),
        selector=jax.tree.map(lambda number: jnp.full(ROWS, number), selector),
        residual=residual,
        chooses=True,
        **off,
    )


SINKS = jnp.asarray([1.0, 3.0, -1.0, 2.0])


@pytest.fixture(params=["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def by_kernels(monkeypatch, request):
    """Layers choose as on a GPU or a TPU, by interpreted kernels: on a GPU over tables of a power of two.

    A GPU's registers hold few numbers, so that what has one for every block and channel is added up in pieces.
    """
    for module in (gpu, pieces, traced):
        monkeypatch.setattr(module, "MOST_NUMBERS", 64)
    for module in (gpu, tpu):
        monkeypatch.setattr(module, "by_kernels", partial(module.by_kernels, interpret=True))
    monkeypatch.setattr(add_residual, "add_residual", partial(add_residual.add_residual, interpret=True))

    def use() -> None:
        for module in (blocks_module, attended, block_sparse, selection, once, api):
            monkeypatch.setattr(module, "platform", lambda: request.param)

    return use


def mixed_rows(selector, **changes) -> BlockSparseLayer:
    """A row that chooses, one that is too short for that, and one that reads again what it read last."""
    last = jnp.full((ROWS, MODEL.num_kv_heads, 1), 0b10110, jnp.uint32)
    return replace(pruned(selector), last=last, **changes)


SHARES = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(TOKENS), (ROWS, MODEL.num_heads)), jnp.float32)


@pytest.mark.parametrize(
    "reader",
    [
        mixed_rows(Quest(3)),
        mixed_rows(Quest(3), refresh=jnp.asarray([True, True, False]), min_context=jnp.full(ROWS, 8)),
        mixed_rows(Guarded(ActiveSet(), sinks=1, window=2, min_blocks=2), mass=SHARES, min_context=jnp.full(ROWS, 8)),
        mixed_rows(Certified(chord_bounds), residual=True, min_context=jnp.full(ROWS, 8)),
    ],
    ids=["chosen", "some again", "masses", "residual"],
)
def test_a_layer_reads_by_kernels_what_it_reads_by_xla(by_kernels, reader):
    """Of twelve blocks, which is no power of two."""
    softmax = Softmax(scale=MODEL.head_dim**-0.5, sink_logits=SINKS)
    out, notes = read(reader, softmax)
    by_kernels()
    out_by_kernels, notes_by_kernels = read(reader, softmax)
    if selection.platform() == "gpu":  # where a layer of a stack has its own page numbers
        stacked, notes_stacked = read(reader, softmax, depth=3)
        np.testing.assert_array_equal(stacked, out_by_kernels)
        jax.tree.map(np.testing.assert_array_equal, notes_stacked, notes_by_kernels)
    np.testing.assert_allclose(out_by_kernels, out, atol=1e-5)
    np.testing.assert_array_equal(notes_by_kernels.block_mask, notes.block_mask)
    read_by_all = int(np.bitwise_count(np.asarray(notes.block_mask)).sum())
    assert read_by_all < MODEL.num_kv_heads * ROW_LENGTHS.sum()
    least = 0 if reader.min_context is None else 8
    scored = least <= ROW_LENGTHS
    scored &= True if reader.refresh is None else np.asarray(reader.refresh)
    for name in ("kept", "entropy"):
        one, other = (np.asarray(getattr(each.by_head, name))[scored] for each in (notes_by_kernels, notes))
        np.testing.assert_allclose(one, other, atol=1e-5)
    if notes.block_mass is not None:
        np.testing.assert_allclose(notes_by_kernels.block_mass, notes.block_mass, atol=1e-5)


def test_a_layer_that_rotates_and_stores_by_a_kernel_reads_what_it_reads_by_xla(monkeypatch):
    """The last of three layers, of which one row fills a page, and one does not run."""
    monkeypatch.setattr(extend, "rotate_store", partial(rotate_store.rotate_store, interpret=True))
    c, size, count = MODEL, 4, jnp.asarray([1, 1, 0], jnp.int32)
    plant = replace(PLANT, page_size=size)
    all_heads = jax.random.normal(jax.random.key(0), (ROWS, 1, c.num_heads + 2 * c.num_kv_heads, c.head_dim))
    q, k, v = jnp.split(all_heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=2)
    angle, start = 7 * all_heads[:, :, 0, : c.head_dim // 2], jnp.asarray([7, 5, 3], jnp.int32)
    angles = jnp.cos(angle), jnp.sin(angle)
    blank = kv.empty(3, c.num_kv_heads, c.head_dim, 10, size, jnp.float32, depths=(3,)).layers[0]
    pages = jax.random.normal(jax.random.key(9), blank.pages.shape)
    cached = replace(blank, pages=jnp.where(jnp.arange(pages.shape[-1]) < 2 * c.head_dim, pages, 0.0))
    table, token = 1 + jnp.arange(6, dtype=jnp.int32).reshape(ROWS, 2), jnp.zeros((ROWS, 1), jnp.int32)
    chunk = Chunk(slot=None, table=table, token=token, position=start, start=start, count=count, end=start + count)
    turn, places = jnp.int32(2), places_of(chunk, size)
    chunk = replace(chunk, table=cached.numbers(table, turn), own_table=table, turn=turn, places=places)
    given = plant, Softmax(scale=c.head_dim**-0.5), chunk, EVERY_BLOCK
    out, written, _ = extend.attend(*given, rotate(q, *angles), rotate(k, *angles), v, cached, None)
    by_kernel, stored, _ = extend.attend_rotated(*given, (q, k, v, *angles), cached, None)
    np.testing.assert_allclose(by_kernel, out, atol=1e-5)
    assert (np.asarray(stored.summaries.mean) != 0).any()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), stored, written)


@pytest.mark.parametrize("soft_cap", [None, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_with_one_token_a_page_the_residual_makes_up_for_what_was_left_out(soft_cap, sinks):
    softmax = Softmax(scale=MODEL.head_dim**-0.5, soft_cap=soft_cap, sink_logits=sinks)
    whole, _ = read(EVERY_BLOCK, softmax)
    left_out, made_up = (read(pruned(SinksWindow(1, 2), residual), softmax)[0] for residual in (False, True))
    np.testing.assert_allclose(made_up, whole, atol=1e-5)
    assert np.abs(left_out - whole).max() > 0.05


def test_a_row_of_the_residual_has_the_same_bits_in_any_company_and_capacity():
    """What lies beyond a row's own blocks adds nothing, and pages that nobody holds may be anything."""
    rng, lengths = np.random.default_rng(4), np.asarray([9, 300, 131, 517], np.int32)
    k, g, d, page, capacity = 2, 3, 8, 4, 130
    held = -(-lengths // page)
    there = np.arange(capacity) < held[:, None]
    table = np.where(there, 1 + np.arange(4 * capacity, dtype=np.int32).reshape(4, capacity), 0)
    mean = np.full((k, 1 + 4 * capacity, 2 * d), np.nan, np.float32)
    mean[:, table[there]] = rng.normal(size=(k, held.sum(), 2 * d))
    opened = (rng.random((4, k, capacity)) < 0.2) & there[:, None]
    estimate = rng.normal(size=(4, k, g, capacity)).astype(np.float32)
    out, log_read = rng.normal(size=(4, k, g, d)).astype(np.float32), 2.0
    by_list = np.where(np.arange(capacity) == 0, np.float32(log_read), np.full_like(estimate, -np.inf))

    @jax.jit
    def residual(lengths, out, table, opened, estimate, by_list):
        blocks = blocks_of(table, lengths, page, None)
        read = read_after(opened, estimate, blocks, by_list, residual=True)
        return with_residual(out.reshape(-1, k * g, d), read.residual, blocks, jnp.asarray(mean)).reshape(out.shape)

    def made_up(rows: slice, num_blocks: int) -> np.ndarray:
        by_block = (x[rows, ..., :num_blocks] for x in (table, opened, estimate, by_list))
        return np.asarray(residual(lengths[rows], out[rows], *by_block))

    together = made_up(slice(0, 4), capacity)
    assert np.isfinite(together).all()
    for row, blocks in enumerate(held):
        for num_blocks in (blocks, capacity):
            np.testing.assert_array_equal(made_up(slice(row, row + 1), num_blocks)[0], together[row])
    weight = np.where(~opened & there[:, None], 1.0, 0.0)[:, :, None] * np.exp(estimate)
    value = np.nan_to_num(mean[:, table, d:]).swapaxes(0, 1)
    whole = np.exp(log_read) * out + np.einsum("bkgn,bknd->bkgd", weight, value)
    np.testing.assert_allclose(together, whole / (np.exp(log_read) + weight.sum(-1))[..., None], rtol=1e-4, atol=1e-5)
