"""The operations that have kernels: their named shapes, their formulas in float64, and NaN wherever nothing is read."""

import dataclasses
import importlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import pytest
from ladder import LSE_TOLERANCE, TOLERANCE, numbers, with_nan_unseen

from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_prefill import paged_prefill
from scripts.measuring.kernel_shapes import block_scores as scored
from scripts.measuring.kernel_shapes import paged_attention as attended
from scripts.measuring.kernel_shapes import paged_prefill as prefilled

SCORE_TOLERANCE = 5e-5
"""Of sums of up to 256 products of size one, in float32 whatever the dtype of the arguments."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One function with several backends, and what its tests need.

    formula: its results in float64 NumPy. poisoned: the same arguments with NaN in all that is not read.
    """

    name: str
    function: Callable[..., Any]
    shapes: dict[str, Any]
    example: Callable[..., dict[str, Any]]
    formula: Callable[..., tuple]
    poisoned: Callable[..., dict[str, Any]]

    def assert_close(self, got: Any, expected: Any, shape: Any) -> None:
        """Compare results, of which none is NaN."""
        tolerances = (TOLERANCE[shape.dtype], LSE_TOLERANCE)
        if self.name in ("block_scores", "code_scores"):
            tolerances = (SCORE_TOLERANCE,) * len(expected)
        for one, other, tolerance in zip(got, expected, tolerances, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
                assert not np.isnan(one).any()
                np.testing.assert_array_equal(np.isinf(one), np.isinf(other))
                np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def attended_tokens(arguments: dict[str, Any], shape: Any, kv_head: int, page: Any, seen: Any) -> np.ndarray:
    """Keys and values "s e" of the seen tokens of a page, in float64."""
    token = np.asarray(arguments["pages"][kv_head, page], np.float64)[seen]
    if arguments["kv_scales"] is None:
        return token
    scales = np.asarray(arguments["kv_scales"][kv_head, page], np.float64)[:, seen].T
    return token * np.repeat(scales, [shape.head_dim, shape.width - shape.head_dim], axis=1)


def weighed(query: np.ndarray, token: np.ndarray, shape: Any) -> tuple[np.ndarray, float, float]:
    """The values mixed by e^score, the sum of e^score, and its logarithm."""
    d = shape.head_dim
    z = d**-0.5 * (token[:, :d] @ query)
    z = z if shape.soft_cap is None else shape.soft_cap * np.tanh(z / shape.soft_cap)
    total = np.exp(z).sum()
    return np.exp(z) @ token[:, d : 2 * d], total, np.log(total) if len(z) else -np.inf


def attention(arguments: dict[str, Any], shape: Any) -> tuple[np.ndarray, np.ndarray]:
    """The docstring of `paged_attention`, block by block."""
    arguments = jax_free(arguments)
    query, sinks = np.asarray(arguments["q"], np.float64), arguments["softmax"].sink_logits
    table, blocks, counts = (arguments[name] for name in ("page_table", "blocks", "counts"))
    b, h, d = query.shape
    s = shape.page_size
    out, block_lse = np.zeros((b, h, d)), np.full((b, h, blocks.shape[2]), -np.inf)
    for row, head in np.ndindex(b, h):
        kv_head, length, slot = head // (h // shape.num_kv_heads), shape.row_lengths[row], row // shape.rows
        mixed, total = np.zeros(d), 0.0 if sinks is None else np.exp(np.float64(sinks[head]))
        for entry, block in enumerate(blocks[slot, kv_head, : counts[slot, kv_head]]):
            if shape.read_apart and not arguments["readers"][slot, kv_head, entry] >> row % shape.rows & 1:
                continue
            behind = length - 1 - (block * s + np.arange(s))
            seen = (behind >= 0) & (behind < (shape.window or length))
            token = attended_tokens(arguments, shape, kv_head, table[slot, block], seen)
            part, share, block_lse[row, head, entry] = weighed(query[row, head], token, shape)
            mixed, total = mixed + part, total + share
        out[row, head] = mixed / total if total else 0.0
    return out, block_lse


def prefill(arguments: dict[str, Any], shape: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """The docstring of `paged_prefill`, query by query."""
    arguments = jax_free(arguments)
    query, sinks = np.asarray(arguments["q"], np.float64), arguments["softmax"].sink_logits
    table, (b, t, h, d) = arguments["page_table"], query.shape
    s, k = shape.page_size, shape.num_kv_heads
    every = np.broadcast_to(np.arange(shape.num_blocks), (b, k, shape.num_blocks))
    blocks = every if arguments["blocks"] is None else arguments["blocks"]
    counts = np.full((b, k), shape.num_blocks) if arguments["counts"] is None else arguments["counts"]
    out, lse = np.zeros((b, t, h, d)), np.full((b, t, h, blocks.shape[2]), -np.inf)
    for row, head, i in np.ndindex(b, h, t):
        kv_head, position = head // (h // k), shape.starts[row] + i
        first = 0 if shape.window is None else max(0, position + 1 - shape.window)
        mixed, total = np.zeros(d), 0.0 if sinks is None else np.exp(np.float64(sinks[head]))
        for entry, block in enumerate(blocks[row, kv_head, : counts[row, kv_head]]):
            seen = slice(max(0, first - block * s), max(0, position + 1 - block * s))
            token = attended_tokens(arguments, shape, kv_head, table[row, block], seen)
            part, share, lse[row, i, head, entry] = weighed(query[row, i, head], token, shape)
            mixed, total = mixed + part, total + share
        out[row, i, head] = mixed / total if total else 0.0
    return out, lse if shape.block_lse else None


def jax_free(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays as NumPy has them, which is quicker to index."""
    return {name: x if x is None or name == "softmax" else np.asarray(x) for name, x in arguments.items()}


def summaries(name: str, arguments: dict[str, Any], shape: Any, soft_cap: float = np.inf) -> tuple[np.ndarray, ...]:
    """The docstrings of `block_scores` and `code_scores`, block by block."""
    arrays, table = numbers(arguments), np.asarray(arguments["page_table"])
    d, s, scale = shape.head_dim, shape.page_size, shape.settings["scale"]
    size = (len(shape.lengths), shape.num_heads, shape.num_blocks)
    found = [np.full(size, empty) for empty in ((-np.inf,) * 3 if name == "block" else (-np.inf, 0.0, 0.0))]
    for (row, length), head in ((each, head) for each in enumerate(shape.lengths) for head in range(shape.num_heads)):
        q, kv_head = arrays["q"][row, head], head // (shape.num_heads // shape.num_kv_heads)
        for block in range(-(-length // s)):
            page = table[row, block]
            least, most = np.split(arrays["key_box"][kv_head, page, : 2 * d], 2)
            if name == "block":
                ends = np.stack([q * least, q * most])
                each = (ends.min(0), ends.max(0), q * arrays["mean"][kv_head, page, :d])
                for result, value in zip(found, each, strict=True):
                    result[row, head, block] = scale * value.sum()
            else:
                step = (most - least) / 255
                codes = arrays["key_codes"][kv_head, page].reshape(s, d)[: length - block * s]
                score = scale * (codes * step + least + 128 * step) @ q
                score = score if soft_cap == np.inf else soft_cap * np.tanh(score / soft_cap)
                found[0][row, head, block] = np.logaddexp.reduce(score)
                found[1][row, head, block] = scale * (np.abs(q) * step).sum() / 2
                found[2][row, head, block] = score.mean()
    return tuple(found)


def nan_unattended(arguments: dict[str, Any], shape: Any) -> dict[str, Any]:
    """NaN out of every query's sight: the null page, unlisted pages, the ends of pages, padding columns."""
    seen = np.zeros(arguments["pages"].shape[:3], bool)
    table, blocks, counts = (np.asarray(arguments[name]) for name in ("page_table", "blocks", "counts"))
    for (row, length), head in ((each, k) for each in enumerate(shape.row_lengths) for k in range(shape.num_kv_heads)):
        slot = row // shape.rows
        for block in blocks[slot, head, : counts[slot, head]]:
            position = block * shape.page_size + np.arange(shape.page_size)
            first = 0 if shape.window is None else length - shape.window
            seen[head, table[slot, block]] |= (position < length) & (position >= first)
    return with_nan_unseen(arguments, seen, 2 * shape.head_dim)


def nan_unprefilled(arguments: dict[str, Any], shape: Any, real: int | None = None) -> dict[str, Any]:
    """NaN behind the first `real` tokens of the chunk, in the null page, in unlisted pages and in padding columns."""
    table, pool = np.asarray(arguments["page_table"]), arguments["pages"].shape[:3]
    if arguments["counts"] is not None:
        read, counts = np.zeros(pool, bool), np.asarray(arguments["counts"])
        for row, head in np.ndindex(*counts.shape):
            read[head, table[row, np.asarray(arguments["blocks"])[row, head, : counts[row, head]]]] = True
        arguments = with_nan_unseen(arguments, read, shape.width)
    written = np.zeros(pool, bool)
    for row, start in enumerate(shape.starts):
        place = np.arange(start + (shape.chunk if real is None else real))
        written[:, table[row, place // shape.page_size], place % shape.page_size] = True
    return with_nan_unseen(arguments, written, 2 * shape.head_dim)


def nan_unscored(arguments: dict[str, Any], shape: Any) -> dict[str, Any]:
    """NaN in the null page, free pages, padding columns, and in what of a mean is no key."""
    box, mean = np.array(arguments["key_box"]), np.array(arguments["mean"])
    unheld = np.ones(box.shape[1], bool)
    for row, length in enumerate(shape.lengths):
        unheld[np.asarray(arguments["page_table"])[row, : -(-length // shape.page_size)]] = False
    box[:, unheld], mean[:, unheld] = np.nan, np.nan
    box[..., 2 * shape.head_dim :], mean[..., shape.head_dim :] = np.nan, np.nan
    return arguments | {"key_box": box, "mean": mean}


def operation(function: Callable[..., Any], module: Any, formula: Any, poisoned: Any) -> Operation:
    """An operation with the named shapes of a module."""
    shapes = {shape.name: shape for shape in module.SHAPES}
    return Operation(function.__name__, function, shapes, module.example, formula, poisoned)


ATTENTION = operation(paged_attention, attended, attention, nan_unattended)
PREFILL = operation(paged_prefill, prefilled, prefill, nan_unprefilled)
BLOCK = operation(block_scores, scored, partial(summaries, "block"), nan_unscored)
CODE = operation(code_scores, scored, partial(summaries, "code"), nan_unscored)
OPERATIONS = (ATTENTION, PREFILL, BLOCK, CODE)


def kernel(operation: Operation, backend: str) -> Callable[..., Any]:
    """The kernel of a backend, whether or not it can run here."""
    folder = "block_scores" if operation in (BLOCK, CODE) else operation.name
    return getattr(importlib.import_module(f"et_jax.pallas.{folder}.{backend}"), operation.name)


def each(names: dict[str, list[str]], quick: Collection[str] = ()) -> pytest.MarkDecorator:
    """An operation and a shape for each of its names; those that are not quick are slow."""
    slow = [pytest.mark.slow]
    cases = [
        pytest.param(one, one.shapes[name], id=f"{one.name}-{name}", marks=[] if name in quick else slow)
        for one in OPERATIONS
        for name in names[one.name]
    ]
    return pytest.mark.parametrize(("operation", "shape"), cases)


def with_a_fault(arguments: dict[str, Any], shape: Any, column: int, place: int) -> dict[str, Any]:
    """NaN in one column of the token at a place of the first row under the first head, or in its scale of 8 bits."""
    page = np.asarray(arguments["page_table"])[0, place // shape.page_size]
    if arguments["kv_scales"] is not None:
        scales = np.array(arguments["kv_scales"])
        scales[0, page, int(column >= shape.head_dim), place % shape.page_size] = np.nan
        return arguments | {"kv_scales": scales}
    pages = np.array(arguments["pages"])
    pages[0, page, place % shape.page_size, column] = np.nan
    return arguments | {"pages": pages}


def assert_fault_shows(out: Any, shape: Any, place: int) -> None:
    """Of the first row the queries of the first KV head from a place on are NaN, and no others."""
    group, out = shape.num_heads // shape.num_kv_heads, np.asarray(out, np.float64)[0]
    first = max(0, place - shape.starts[0])
    assert np.isnan(out[first:, :group]).any(axis=-1).all()
    assert not np.isnan(out[:first]).any() and not np.isnan(out[:, group:]).any()
