"""One function for every row and KV head, by kernels as by `vmap`, in a pool of several layers; selectors above all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BLOCK, CODE
from jax.experimental.pallas import tpu as pltpu
from ladder import taken

from et_jax.control.bisect import above_threshold
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.select import (
    ActiveSet,
    Certified,
    Guarded,
    Quest,
    SinksWindow,
    TopBlocks,
    TopMass,
    chord_bounds,
    coded_bounds,
)
from et_jax.control.select import PerHead as ToleranceOfHeads
from et_jax.control.selector import as_selector
from et_jax.decode.attention.blocks import LayerKind
from et_jax.decode.attention.selection import (
    Fallback,
    SelectorInputs,
    moved_to_list,
    placed_in_list,
    selected_blocks,
    selection_of,
)
from et_jax.decode.attention.summaries import summarised, summarised_by_kernel
from et_jax.decode.cache import kv
from et_jax.pallas.block_scores import gpu as scores_gpu
from et_jax.pallas.per_head import Listed, Pages, PerHead, PerQuery, PerRow, Placed, gpu, per_head, tpu
from et_jax.pallas.per_head.api import by_vmap
from et_jax.pallas.per_head.gpu import by_kernels
from et_jax.pallas.per_head.traced import left_to_xla
from et_jax.pallas.store_rows import store_rows
from et_jax.softmax import capped
from et_jax.sums import softmax, total_where
from et_jax.types import replace

ROWS, HEADS, DIM, BLOCKS, PAGE = 8, 2, 16, 32, 8
STACKED = {"turn": jnp.asarray([1], jnp.int32), "depth": 3}


def given(group: int):
    rng = np.random.default_rng(group)
    score = jnp.asarray(rng.normal(size=(3, HEADS, group, BLOCKS)), jnp.float32)
    place = np.argsort(rng.random((3, HEADS, BLOCKS)), axis=-1)
    pool = jnp.asarray(rng.normal(size=(HEADS, 100, 2 * DIM)), jnp.float32)
    page = jnp.asarray(rng.integers(1, 100, (3, BLOCKS)), jnp.int32)
    return (
        PerQuery(array=score),
        PerRow(array=jnp.asarray([5, 17, BLOCKS], jnp.int32)),
        Pages(pool=pool, page=page, columns=(DIM, 2 * DIM)),
        Listed(array=score, place=jnp.asarray(place, jnp.int32)),
        PerQuery(array=jnp.asarray(rng.random((1, HEADS, group)), jnp.float32)),
    )


def cut(score, length, value, listed, share):
    """Two kernels with a sort between them: the fewest blocks that add enough, of the half that adds most."""
    held = jnp.arange(BLOCKS) < length
    mass = softmax(jnp.where(held, score, -1e30))
    far = jnp.sqrt(jnp.sum(jnp.square(value[None] - (mass @ value)[:, None]), axis=-1))
    added = mass * far
    half = added > jnp.sort(added, axis=-1)[:, BLOCKS // 2, None]
    opened = above_threshold(added, lambda it: total_where(added, ~it) <= share) & half
    opened = jnp.any(opened, axis=0) & held
    before = jnp.cumsum(opened)
    block = jnp.arange(BLOCKS)
    place = jnp.where(opened, before - 1, BLOCKS - 1 - (block - before))
    return {"opened": opened, "list": Placed(array=block, place=place), "listed": listed, "count": before[-1]}


@pytest.mark.parametrize(("chip", "group"), [(gpu, 4), (gpu, 3), (tpu, 3)])
def test_kernels_make_of_every_row_and_head_what_vmap_makes(chip, group):
    inputs = given(group)
    expected, found = by_vmap(cut, inputs), chip.by_kernels(cut, inputs, interpret=True)
    names = {gpu: ("slice", "sort"), tpu: ("dot_general", "sort")}
    assert left_to_xla(cut, inputs, chip.__name__.split(".")[-1]) == {"kernels have no such operation": names[chip]}
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    order = np.take_along_axis(np.asarray(found["opened"]), np.asarray(found["list"]), axis=-1)
    assert (np.diff(order.astype(int), axis=-1) <= 0).all() and 0.1 < order.mean() < 0.9  # the opened ones come first


def test_a_sum_over_query_heads_is_refused_where_a_kernel_repeats_one():
    with pytest.raises(NotImplementedError, match="reduce_sum over the 3 query heads"):
        by_kernels(lambda score, *_: jnp.sum(score, axis=0), given(3), interpret=True)
    with pytest.warns(UserWarning, match="runs by XLA and not in one kernel: reduce_sum"):
        found = per_head(lambda score, *_: jnp.sum(score, axis=0), *given(3), chip="gpu")
    np.testing.assert_allclose(found, jnp.sum(given(3)[0].array, axis=2), rtol=1e-6)
    summed = by_kernels(lambda score, *_: jnp.sum(score, axis=0), given(4), interpret=True)
    np.testing.assert_allclose(summed, jnp.sum(given(4)[0].array, axis=2), rtol=1e-6)


@pytest.mark.parametrize("group", [4, 3])
def test_arrays_that_registers_do_not_hold_are_added_up_in_pieces(group):
    """For every query head, block and channel a number; a kernel has an eighth of them at a time."""
    rng, blocks, dim = np.random.default_rng(group), 512, 128
    share = jnp.asarray(rng.dirichlet(np.ones(blocks), (2, HEADS, group)), jnp.float32)
    own = PerHead(array=jnp.asarray(rng.normal(size=(2, HEADS, dim)), jnp.float32))
    pages = Pages(
        pool=jnp.asarray(rng.normal(size=(HEADS, 100, 2 * dim)), jnp.float32),
        page=jnp.asarray(rng.integers(1, 100, (2, blocks)), jnp.int32),
        columns=(dim, 2 * dim),
    )
    inputs = PerQuery(array=share), own, pages, PerRow(array=jnp.asarray([70, 512], jnp.int32))

    def influence(share, own, value, length):
        block = jnp.arange(blocks)[:, None]
        value = jnp.where(block < length - 1, value, jnp.where(block < length, own, 0.0))
        out = share @ value
        return jnp.sqrt(jnp.sum(jnp.square(value[None] - out[:, None]), axis=-1)), out, jnp.sum(value, axis=0)

    assert not left_to_xla(influence, inputs)
    expected, found = by_vmap(influence, inputs), by_kernels(influence, inputs, interpret=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chip", [gpu, tpu])
def test_a_loop_ends_for_each_row_by_itself(chip, monkeypatch):
    monkeypatch.setattr(tpu, "FEW", 0)
    length = jnp.asarray([3, 0, 7], jnp.int32)

    def added_up(score, length):
        return jax.lax.while_loop(lambda x: x[0] < length, lambda x: (x[0] + 1, x[1] + x[0]), (0, 0))[1]

    inputs = PerQuery(array=jnp.ones((3, HEADS, 2, BLOCKS))), PerRow(array=length)
    found = chip.by_kernels(added_up, inputs, interpret=True)
    np.testing.assert_array_equal(found, np.broadcast_to([[3], [0], [21]], (3, HEADS)))


def stacked(pool):
    """A pool of three layers, the second the given one, and NaN or an extreme in the others."""
    other = jnp.full_like(pool, jnp.nan if jnp.issubdtype(pool.dtype, jnp.inexact) else 100)
    return jnp.concatenate([other, pool, other], axis=1)


def test_a_page_gets_its_summary_and_codes_by_a_kernel_in_its_layer():
    """Every row's page holds what XLA writes; the null page, which stands for no page, may hold anything."""
    rng = np.random.default_rng(0)
    layer = kv.empty(1, HEADS, DIM, 12, PAGE, jnp.float32, key_codes=True).layers[0]
    tokens = rng.normal(size=(*layer.pages.shape[:3], 2 * DIM))
    layer = replace(layer, pages=layer.pages.at[..., : 2 * DIM].set(jnp.asarray(tokens, jnp.float32)))
    page, size = jnp.asarray([[3, 0], [7, 8]], jnp.int32), layer.pages.shape[1]
    none = jnp.where(page == 0, size, page)
    many = jax.tree.map(stacked, layer)
    alone, layered = (
        summarised_by_kernel(each.summaries, each.key_codes, each.pages, None, page, DIM, **more, interpret=True)
        for each, more in ((layer, {}), (many, STACKED))
    )
    expected = summarised(layer.summaries, layer.key_codes, layer.tokens(none, DIM), none, DIM)
    before = jax.tree.leaves((many.summary, many.key_codes))
    for one, other, found, old in zip(*map(jax.tree.leaves, (alone, expected, layered)), before, strict=True):
        np.testing.assert_allclose(one[:, 1:], other[:, 1:], rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(found[:, size : 2 * size], one)
        for others in (slice(size), slice(2 * size, None)):
            np.testing.assert_array_equal(found[:, others], old[:, others])
    assert (np.asarray(alone[1])[:, [3, 7, 8]].std(axis=-1) > 10).all()


@pytest.mark.parametrize("backend", ["gpu", "xla"])
@pytest.mark.parametrize("operation", [BLOCK, CODE], ids=lambda each: each.name)
def test_blocks_of_a_layer_are_scored_by_its_pages(operation, backend):
    shape = operation.shapes["hopper_dim_128"]
    arguments = {name: jnp.asarray(x) for name, x in taken(operation.function, operation.example(shape)).items()}
    pools = {name: stacked(x) for name, x in arguments.items() if name in ("key_box", "mean", "key_codes")}

    def run(**given):
        if backend == "xla":
            return operation.function(**given, **shape.settings, backend="xla")
        return getattr(scores_gpu, operation.name)(**given, **shape.settings, interpret=True)

    for one, other in zip(run(**arguments | pools, **STACKED), run(**arguments), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("run", [by_vmap, *(partial(chip.by_kernels, interpret=True) for chip in (gpu, tpu))])
def test_a_function_receives_the_numbers_of_its_layer(run):
    *inputs, share = given(4)
    layered = replace(share, array=jnp.concatenate([0 * share.array, share.array]), layer=jnp.asarray([1], jnp.int32))

    def product(score, length, value, listed, share):
        return score * share[:, None]

    np.testing.assert_array_equal(run(product, (*inputs, layered)), run(product, (*inputs, share)))


SELECTORS = {
    "Quest": Quest(5),
    "sinks and window": SinksWindow(4, 20),
    "blocks": TopBlocks(),
    "mass": TopMass(),
    "guarded": Guarded(TopMass(), sinks=9, window=17, min_blocks=6),
    "paper": Guarded(ActiveSet(), sinks=0, window=0, min_blocks=3),
    "chord": Certified(chord_bounds),
    "codes, by head": ToleranceOfHeads(Certified(coded_bounds), AttentionEntropy(0.8)),
    "error": ExpectedError(),
    "plain function": as_selector(lambda view: jnp.max(view.middle, axis=0) > 0.5),
}


def drawn(rng: np.random.Generator, group: int, soft_cap: float | None) -> tuple[SelectorInputs, PerRow, Fallback]:
    """Rows of every length, none too; scores with ties and far apart; NaN in what lies past a row's end."""
    length = rng.integers(0, BLOCKS * PAGE + 1, ROWS)
    length[0] = 0
    scale = rng.choice([0.1, 1.0, 8.0], size=(ROWS, 1, 1, 1))
    middle = np.round(rng.normal(size=(ROWS, HEADS, group, BLOCKS)) * scale, 1)  # many are equal
    apart = np.round(rng.random(middle.shape) * scale, 1)
    held = np.arange(BLOCKS) < -(-length[:, None] // PAGE)
    low, high, mean, coded = (
        np.where(held[:, None, None], x, -np.inf) for x in (middle - apart, middle + apart, middle, middle + 2.0)
    )
    error = np.where(held[:, None, None], 0.05, 0.0)
    num_pages = ROWS * BLOCKS + 1
    page = 1 + np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    means, radius = rng.normal(size=(HEADS, num_pages, 2 * DIM)), rng.random((HEADS, num_pages))
    pages = rng.normal(size=(HEADS, num_pages, PAGE, 2 * DIM))
    last = np.maximum(length - 1, 0) // PAGE
    tail = page[np.arange(ROWS), last]
    for row in range(ROWS):  # what no token of the row has written
        pages[:, tail[row], length[row] - last[row] * PAGE :] = np.nan
        means[:, page[row, last[row] :]] = np.nan

    def numbers(x, dtype=jnp.float32):
        return jnp.asarray(x, dtype)

    def of_pages(first: int) -> Pages:
        return Pages(pool=numbers(means), page=numbers(page, jnp.int32), columns=(first, first + DIM))

    def per_query(x) -> PerQuery:
        return PerQuery(array=numbers(np.broadcast_to(x, middle.shape)))

    query = rng.normal(size=(ROWS, HEADS, group, DIM))
    inputs = SelectorInputs(
        query=PerQuery(array=numbers(query)),
        low=per_query(low),
        high=per_query(high),
        middle=per_query(mean),
        coded=per_query(coded if soft_cap is None else np.asarray(capped(numbers(coded), soft_cap))),
        error=per_query(error),
        coded_mean=per_query(np.where(np.isfinite(mean), mean, 0.0)),
        key=Pages(pool=numbers(pages), page=numbers(tail, jnp.int32), columns=(0, DIM)),
        value=Pages(pool=numbers(pages), page=numbers(tail, jnp.int32), columns=(DIM, 2 * DIM)),
        key_scale=None,
        value_scale=None,
        key_min=of_pages(0),
        key_max=of_pages(0),
        key_mean=of_pages(0),
        value_mean=of_pages(DIM),
        value_radius=Pages(pool=numbers(radius), page=numbers(page, jnp.int32)),
        mean_surprisal=None,
        last_mass=per_query(rng.dirichlet(np.full(BLOCKS, 0.2), (ROWS, HEADS, group))),
        sensitivity=PerQuery(array=numbers(rng.random((1, HEADS, group)))),
        length=PerRow(array=numbers(length, jnp.int32)),
        tolerance=PerRow(array=numbers(rng.choice([0.0, 0.02, 0.1, 0.4], ROWS))),
    )
    long, fresh = (PerRow(array=numbers(rng.random(ROWS) < 0.9, jnp.int32)) for _ in range(2))
    words = rng.integers(0, 2**32, (ROWS, HEADS, BLOCKS // 32), dtype=np.uint32)
    return inputs, inputs.length, Fallback(long=long, refresh=fresh, last=PerHead(array=jnp.asarray(words)))


KINDS = [(None, None, 4), (37, None, 3), (None, 30.0, 2)]  # window, soft cap, query heads of a KV head
QUICK = [(gpu, "Quest", KINDS[1]), (tpu, "paper", KINDS[0]), (gpu, "codes, by head", KINDS[2])]
EVERY = [((gpu, gpu, tpu)[(i + j) % 3], name, kind) for i, name in enumerate(SELECTORS) for j, kind in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("draws", "chip", "name", "kind"),  # of 16 views a draw
    [*((10, *one) for one in QUICK), *(pytest.param(70, *one, marks=pytest.mark.slow) for one in EVERY)],
    ids=lambda one: str(getattr(one, "__name__", one)),
)
def test_a_selector_chooses_the_same_in_a_kernel(draws, chip, name, kind):
    window, soft_cap, group = kind
    layer = LayerKind(page_size=PAGE, window=window, soft_cap=soft_cap)
    numbers = jax.tree.map(lambda x: PerRow(array=jnp.full(ROWS, x)), SELECTORS[name])

    def chosen(selector, inputs, length, fallback):
        return selected_blocks(layer, True, selection_of(layer, None, selector, inputs), length, fallback)

    @jax.jit
    def both(inputs, length, fallback):
        given = numbers, inputs, length, fallback
        return chip.by_kernels(chosen, given, interpret=True), by_vmap(chosen, given)

    rng = np.random.default_rng(len(name))
    opened = 0.0
    for _ in range(draws):
        by_kernel, plain = both(*drawn(rng, group, soft_cap))
        np.testing.assert_array_equal(by_kernel.mask, plain.mask)
        np.testing.assert_array_equal(by_kernel.listed, plain.listed)
        np.testing.assert_array_equal(by_kernel.count, plain.count)
        np.testing.assert_allclose(by_kernel.estimate, plain.estimate, rtol=1e-5, atol=1e-5)
        opened += float(np.mean(plain.opened)) / draws
    assert 0.02 < opened < 0.6  # on average half of the blocks are held


@pytest.mark.parametrize("blocks", [1, 5, 64])
def test_opened_blocks_move_to_their_places_in_the_list(blocks):
    rng = np.random.default_rng(blocks)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        opened = jnp.asarray(rng.random(blocks) < share)
        count, before = int(opened.sum()), jnp.cumsum(opened, dtype=jnp.int32)
        placed, moved = placed_in_list(opened, before), np.asarray(moved_to_list(opened, before))
        np.testing.assert_array_equal(moved[:count], np.flatnonzero(opened))
        assert (moved[count:] == 0).all()
        np.testing.assert_array_equal(np.sort(placed.place), np.arange(blocks))


def test_rows_are_stored_at_their_pages_and_those_past_the_end_dropped():
    rng, page = np.random.default_rng(0), jnp.asarray([3, 9, 0, 12], jnp.int32)
    pools = [jnp.asarray(rng.normal(size=(HEADS, 9, 4 * DIM)), dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    new = [jnp.asarray(rng.normal(size=(HEADS, 4, 4 * DIM)), pool.dtype) for pool in pools]
    expected = [pool.at[:, page].set(rows, mode="drop") for pool, rows in zip(pools, new, strict=True)]
    found = store_rows(pools, page, new, interpret=pltpu.InterpretParams())
    jax.tree.map(np.testing.assert_array_equal, found, expected)
