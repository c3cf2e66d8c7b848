"""Stores rows at pages of pools on a TPU, by copies in high-bandwidth memory.

XLA stores them one after another in a loop, or together in a scatter. The loop makes it move an entire pool to vector
memory and back if there is room, in every layer, and the scatter may copy a pool to another layout.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped


def store_rows(
    pools: Sequence[Shaped[Array, "k p e"]],
    page: Int[Array, " n"],
    new: Sequence[Shaped[Array, "k n e"]],
    interpret: bool | pltpu.InterpretParams = False,
) -> list[Shaped[Array, "k p e"]]:
    """Return pools with their `new` rows at these pages, which differ. Pages past the end are dropped.

    `interpret` runs the kernel on a CPU, for tests.
    """
    num_pages, num_rows, count = pools[0].shape[1], page.shape[0], len(pools)
    views = [x.swapaxes(0, 1) for x in (*new, *pools)]  # "n k e" and "p k e": XLA has a pool of several heads so

    def store(page_ref, *refs) -> None:
        rows, stored, arrived = refs[:count], refs[2 * count : 3 * count], refs[3 * count]

        def copies(i: Int[Array, ""]) -> list:
            at = page_ref[i]
            pairs = zip(rows, stored, strict=True)
            return [pltpu.make_async_copy(row.at[i], pool.at[at], arrived.at[j]) for j, (row, pool) in enumerate(pairs)]

        def start(i: Int[Array, ""], _: None) -> None:
            @pl.when(page_ref[i] < num_pages)
            def _() -> None:
                for copy in copies(i):
                    copy.start()

        def wait(i: Int[Array, ""], _: None) -> None:
            @pl.when(page_ref[i] < num_pages)
            def _() -> None:
                for copy in copies(i):
                    copy.wait()

        lax.fori_loop(0, num_rows, start, None)
        lax.fori_loop(0, num_rows, wait, None)

    made = pl.pallas_call(
        store,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[pl.BlockSpec(memory_space=pl.ANY)] * 2 * count],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * count,
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in views[count:]],
        scratch_shapes=[pltpu.SemaphoreType.DMA((count,))],
        input_output_aliases={1 + count + i: i for i in range(count)},
        interpret=interpret,
        name="store_rows",
    )(page.astype(jnp.int32), *views)
    return [x.swapaxes(0, 1) for x in made]
