"""Scores of every block from its page's summary: two functions that check their arguments and pick a backend."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.backend import NAMES, kernel, resolve
from et_jax.pallas.checks import FLOATS, code_rows, require, require_integers, require_shape

BLOCK_BACKENDS = {name: kernel("block_scores", name, "block_scores") for name in NAMES}
CODE_BACKENDS = {name: kernel("block_scores", name, "code_scores") for name in NAMES}


def block_scores(
    q: Float[Array, "b h d"],
    key_box: Float[Array, "k p e"],
    mean: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    backend: str | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return the least, the greatest and the mean score of every block of a row, from its page's summary.

    With min and max the channelwise extremes of a page's keys,

        low    = scale sum_c min(q_c min_c, q_c max_c)
        high   = scale sum_c max(q_c min_c, q_c max_c)
        middle = scale q . mean key                          all three float32

    key_box: min in [..., :d], max in [..., d:2d]; e = 2d padded to a multiple of 128. mean: the mean key in
        [..., :d], float32. The padding and page 0, the null page, may contain anything.
    page_table: block i of row b is page page_table[b, i], with positions [i page_size, (i + 1) page_size).
    lengths: tokens in the cache. Blocks at or past the length are -inf in all three.
    turn: for a pool shared equally by `depth` layers, the layer whose pages the table numbers; None for one layer.

    Query head h reads KV head h // (h / k). Products run in full float32 on every chip, because the bounds require
    it. Source of `high`: Quest (Tang et al. 2024).
    """
    _require(q, key_box, page_table, lengths, page_size, scale)
    require_shape("mean", mean, key_box.shape, "k p e")
    require(mean.dtype == jnp.float32, "mean", mean.dtype, "float32")
    name = resolve(backend, BLOCK_BACKENDS)
    with jax.named_scope(f"block_scores/{name}"):
        table, layers = _of_layers(name, page_table, key_box, turn, depth)
        return BLOCK_BACKENDS[name](q, key_box, mean, table, lengths, page_size=page_size, scale=scale, **layers)


def code_scores(
    q: Float[Array, "b h d"],
    key_codes: Int8[Array, "k p r w"],
    key_box: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    backend: str | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return each block's log-sum-exp from 8-bit copies of its keys, a bound on its error, and the mean score.

    A key is approximated by code * s_c + o_c, rounded to the nearest, with s_c = (max_c - min_c) / 255 and
    o_c = min_c + 128 s_c of its page's box:

        block_lse = log sum_(j in block) exp(cap(scale q . key_j))     in nats, float32
        error     = scale sum_c |q_c| s_c / 2                          block_lse is within it of the stored keys' own
        mean      = mean_(j in block) cap(scale q . key_j)             likewise

    key_codes: a page's tokens one after the other, in the rows of `checks.code_rows`. The rest is as in `block_scores`.
    Tokens at or past the length do not count; blocks there are -inf with error and mean 0. cap(z) is
    soft_cap tanh(z / soft_cap), or z for None: its slope is at most 1, so the error bound is unchanged.
    """
    _require(q, key_box, page_table, lengths, page_size, scale)
    require(soft_cap is None or soft_cap > 0, "soft_cap", soft_cap, "a positive number or None")
    require(key_codes.dtype == jnp.int8, "key_codes", key_codes.dtype, "int8")
    require_shape("key_codes", key_codes, (*key_box.shape[:2], *code_rows(page_size, q.shape[2])), "k p r w")
    name = resolve(backend, CODE_BACKENDS)
    with jax.named_scope(f"code_scores/{name}"):
        table, layers = _of_layers(name, page_table, key_box, turn, depth)
        settings = {"page_size": page_size, "scale": scale, "soft_cap": soft_cap}
        return CODE_BACKENDS[name](q, key_codes, key_box, table, lengths, **settings, **layers)


def _of_layers(
    name: str, table: Int[Array, "b n"], key_box: Float[Array, "k p e"], turn: Int[Array, "1"] | None, depth: int
) -> tuple[Int[Array, "b n"], dict[str, Any]]:
    """Return the table for a backend, and the arguments by which its kernel finds the pages of a layer itself."""
    if turn is None or name == "gpu":
        return table, {} if turn is None else {"turn": turn, "depth": depth}
    return table + turn * (key_box.shape[1] // depth), {}


def _require(q: Array, key_box: Array, page_table: Array, lengths: Array, page_size: int, scale: float) -> None:
    """Raise ValueError unless the common arguments of both functions are consistent."""
    b, h, d = q.shape
    require(q.dtype in FLOATS, "q", q.dtype, "float32 or bfloat16")
    require(key_box.dtype in FLOATS, "key_box", key_box.dtype, "float32 or bfloat16")
    require_shape("key_box", key_box, (None, None, None), "k p e")
    k, _, e = key_box.shape
    require(h % k == 0, "q", f"{h} query heads", f"a multiple of the {k} KV heads of key_box")
    require(e >= 2 * d, "key_box", f"width {e}", f"at least {2 * d}, a least and a greatest key of {d}")
    require_shape("page_table", page_table, (b, None), "b n")
    require_shape("lengths", lengths, (b,), "b")
    for name, array in {"page_table": page_table, "lengths": lengths}.items():
        require_integers(name, array)
    require(page_size >= 1, "page_size", page_size, "at least 1 token")
    require(scale > 0, "scale", scale, "a positive number")
