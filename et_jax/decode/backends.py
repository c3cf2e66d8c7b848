"""The kernels that run a model: the best supported ones, and why better ones are not supported."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from et_jax.control.selector import Selector
from et_jax.decode.attention.blocks import LayerKind, blocks_of, widened
from et_jax.decode.attention.selection import selection_of, selector_inputs, trace_scores
from et_jax.decode.cache import kv
from et_jax.models.config import ModelShape
from et_jax.pallas.backend import NAMES, pick, platform
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.pallas.per_head import PerQuery, PerRow
from et_jax.pallas.per_head.traced import left_to_xla as operations_by_xla
from et_jax.types import replace


def serving_backend(
    model: ModelShape, page_size: int, dtype: DTypeLike, cache_dtype: DTypeLike, first: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the best attention backend, from `first` on, that supports this model, and the refusals of better ones.

    Queries have `dtype` and pages `cache_dtype`. The default `first` is the best one for this device.
    """
    return _first_to_serve(partial(_trace_attention, model, page_size, dtype, cache_dtype), first or pick())


def scoring_backend(
    model: ModelShape, page_size: int, dtype: DTypeLike, key_codes: bool, attention: str
) -> tuple[str, tuple[str, ...]]:
    """Return the backend that scores this model's blocks, that of attention or a fallback, and the refusals."""
    return _first_to_serve(partial(trace_scores, model, page_size, dtype, key_codes), attention)


def left_to_xla(
    model: ModelShape, page_size: int, num_blocks: int, needs: frozenset[str], selector: Selector
) -> dict[str, tuple[str, ...]]:
    """Return the operations of a selector that XLA runs between kernels, by the reason why no kernel does.

    Empty for a CPU, where XLA runs all of them. "all" stands for all operations. Those that a TPU's kernels lack for
    the size of their arrays alone, such as sums over the last page, are not named.
    """
    chip = platform()
    if selector.reads_all or chip == "cpu":
        return {}
    found: dict[str, tuple[str, ...]] = {}
    layer = LayerKind(page_size=page_size, window=None, soft_cap=model.softmax(0).soft_cap)

    def trace() -> None:
        cache = kv.empty(1, model.num_kv_heads, model.head_dim, 2, page_size, jnp.bfloat16, key_codes="codes" in needs)
        ones = jnp.ones(1, jnp.int32)
        blocks = blocks_of(widened(jnp.ones((1, num_blocks), jnp.int32)), ones, page_size, None)
        per_query = jnp.zeros((1, model.num_kv_heads, model.group_size))
        query, mass = (jnp.zeros((*per_query.shape, size)) for size in (model.head_dim, blocks.table.shape[1]))
        surprisal = jnp.zeros((2, page_size)) if "surprisals" in needs else None
        inputs = selector_inputs(query, cache.layers[0], surprisal, blocks, jnp.zeros(1), "xla", layer)
        inputs = replace(
            inputs,
            last_mass=PerQuery(array=mass) if "masses" in needs else None,
            sensitivity=PerQuery(array=per_query) if "sensitivity" in needs else None,
        )
        numbers = jax.tree.map(lambda number: PerRow(array=jnp.full(1, number)), selector)
        try:
            found.update(operations_by_xla(partial(selection_of, layer, None), (numbers, inputs), chip))
        except NotImplementedError as error:
            found[str(error)] = ("all",)

    jax.eval_shape(trace)
    return found


def _first_to_serve(trace: Callable[[str], Any], name: str) -> tuple[str, tuple[str, ...]]:
    """Return the first backend, from `name` on in order of preference, that does not refuse; and the refusals.

    XLA's refuses nothing, so it is not tried.
    """
    names, refusals = list(NAMES), []
    while True:
        if name == "xla":
            return name, tuple(refusals)
        try:
            jax.eval_shape(partial(trace, name))
            return name, tuple(refusals)
        except NotImplementedError as error:
            names.remove(name)
            refusals.append(str(error))
            name = pick(built=names)


def _trace_attention(
    model: ModelShape, page_size: int, dtype: DTypeLike, cache_dtype: DTypeLike, backend: str
) -> list[Array]:
    """Trace both ops on one row and one page, for every kind of layer."""
    integers = partial(jnp.zeros, dtype=jnp.int32)
    layer, *_ = kv.empty(1, model.num_kv_heads, model.head_dim, 2, page_size, cache_dtype, summaries=False).layers
    queries = jnp.zeros((1, page_size, model.num_heads, model.head_dim), dtype)
    lists = integers((1, model.num_kv_heads, 1)), integers((1, model.num_kv_heads))
    traced, stored = [], {"kv_scales": layer.kv_scales, "backend": backend}
    for softmax in dict.fromkeys(replace(model.softmax(i).without_sinks, scale=1.0) for i in range(model.num_layers)):
        decoded, _ = paged_attention(
            queries[:, 0], layer.pages, integers((1, 1)), *lists, integers(1), softmax=softmax, **stored
        )
        chunk, _ = paged_prefill(queries, layer.pages, integers((1, 1)), integers(1), softmax=softmax, **stored)
        traced += [decoded, chunk]
    return traced
