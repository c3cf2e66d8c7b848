"""`paged_attention` without lists: it reads what a list of all blocks in sight names, and has that list's bits."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from cases import ATTENTION
from jax.experimental.pallas import mosaic_gpu as plgpu

from et_jax.pallas.paged_attention import gpu, paged_attention
from et_jax.pallas.paged_attention.api import padded_heads

CASES = [  # a shape, and whether some blocks at its beginning are skipped
    *(("hopper_window", False), ("hopper_empty_slots", True), ("hopper_rows", True), ("hopper_rows_split", False)),
]


def in_sight(shape, skipped):
    """The blocks that a row of each slot sees, after those skipped; counted one by one."""
    lists, counts = [], []
    for slot in range(len(shape.lengths)):
        lengths = shape.row_lengths[slot * shape.rows :][: shape.rows]
        seen = {p // shape.page_size for n in lengths for p in range(max(0, n - (shape.window or n)), n)}
        own = [[block for block in sorted(seen) if block >= first] for first in skipped[slot]]
        lists.append([np.pad(np.asarray(one, np.int32), (0, shape.num_blocks - len(one))) for one in own])
        counts.append([len(one) for one in own])
    return jnp.asarray(np.asarray(lists, np.int32)), jnp.asarray(counts, jnp.int32)


@pytest.mark.parametrize("backend", ["reference", "xla", "gpu"])
@pytest.mark.parametrize(("name", "skips"), CASES)
def test_no_lists_are_lists_of_all_blocks_in_sight(name, skips, backend):
    """And so for the second of two layers that share a pool, with queries beside those of the rows."""
    shape = ATTENTION.shapes[name]
    given = ATTENTION.example(shape) | {"readers": None}
    run = partial(paged_attention, backend=backend)
    if backend == "gpu":
        run = partial(gpu.paged_attention, interpret=plgpu.InterpretGPUParams(detect_races=True))
    skipped = np.zeros((len(shape.lengths), shape.num_kv_heads), np.int32)
    if skips:
        skipped += np.random.default_rng(0).integers(0, 3, skipped.shape, np.int32)
    beside = 0 if shape.rows > 1 else 3
    more = {
        "q": jnp.pad(given["q"], ((0, beside), (0, 0), (0, 0)), constant_values=jnp.nan),
        "pages": jnp.concatenate([jnp.full_like(given["pages"], jnp.nan), given["pages"]], axis=1),
        "blocks": None,
        "counts": None,
        "skipped": jnp.asarray(skipped) if skips else None,
        "turn": jnp.int32(1),
        "depth": 2,
    }
    found = out, block_lse = run(**given | more, **shape.settings)
    rows = len(shape.row_lengths)
    if shape.rows == 1:  # queries that are padded already, which other backends take as well
        q, k = more["q"], shape.num_kv_heads
        by_head = q.reshape(len(q), k, -1, q.shape[-1])
        by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, padded_heads(by_head.shape[2]) - by_head.shape[2]), (0, 0)))
        more |= {"q": by_head.reshape(len(q), -1, q.shape[-1]), "num_heads": q.shape[1]}
        for padded, plain in zip(run(**given | more, **shape.settings), found, strict=True):
            np.testing.assert_array_equal(padded, plain)
    assert block_lse is not None
    assert not np.asarray(out[rows:]).any() and np.isneginf(block_lse[rows:]).all()
    out, block_lse = (np.asarray(x[:rows]) for x in (out, block_lse))
    blocks, counts = in_sight(shape, skipped)
    lists = {"blocks": blocks[..., : block_lse.shape[-1]], "counts": counts}
    expected, by_list = map(np.asarray, run(**given | lists, **shape.settings))
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(block_lse, by_list)
