"""How tight are the certified bounds on real keys? The blocks each bound opens, and what it gives away.

    python scripts/measure_bounds.py --case bundled novels.tar.xz --case FOLDER stories.txt

A dense float32 model reads rows of text at its full context. For queries in the last quarter of a row, at every
layer and KV head, `select.certified` chooses blocks from each bound at each tolerance; `exact` is the oracle that
knows every block's mass. A tar archive gives the works held out from the bundled model's training, any other file its
stories. Ends in an error if more attention mass was left unread than the tolerance allows.

The int8 codes must be read in full before they bound anything: a quarter of a bfloat16 cache, not counted here.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import bounds
from et_jax.control.bounds import Interval
from et_jax.control.select import Certified
from et_jax.control.view import tolerating
from et_jax.evidence import tables
from et_jax.evidence.block_views import CapturedBlocks, blocks_at, capture, key_radius
from et_jax.serve.engine import Model, load
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.text import rows

TOLERANCES = (0.5, 0.2, 0.1, 0.05, 0.01, 0.001)
SHARES = (0.1, 0.25, 0.5)  # of the blocks, open for the residual estimate
ESTIMATES = ("drop", "mean key", "true mass")
ALLOWED = 1.0 + 1e-3  # unread mass over tolerance, for rounding
BOUNDS = ("box", "ball", "box and ball", "chord, box", "chord, both", "int8 codes", "exact")


def intervals(blocks: CapturedBlocks) -> dict[str, Interval]:
    """Return each bound on every block's log Z, in nats."""
    view, count = blocks.view, blocks.view.num_tokens
    box = view.score
    ball = bounds.ball(view.query, view.key_mean, key_radius(blocks))
    narrow = bounds.both(box, ball)
    return {
        "box": bounds.box_mass(box, count),
        "ball": bounds.box_mass(ball, count),
        "box and ball": bounds.box_mass(narrow, count),
        "chord, box": bounds.chord_mass(box, view.middle, count),
        "chord, both": bounds.chord_mass(narrow, view.middle, count),
        "int8 codes": int8_mass(blocks),
        "exact": Interval(low=blocks.log_mass, high=blocks.log_mass),
    }


def int8_mass(blocks: CapturedBlocks) -> Interval:
    """Return the bounds that 8-bit key codes allow, their scale set by each block's box."""
    view = blocks.view
    scale, offset = bounds.code_scale(view.key_min, view.key_max)
    steps = (blocks.key - offset[:, None]) / jnp.where(scale > 0, scale, 1.0)[:, None]
    codes = jnp.clip(jnp.round(steps), -128, 127).astype(jnp.int8)
    return bounds.coded_mass(view.query, codes, scale, offset, view.num_tokens)


def choices(blocks: CapturedBlocks) -> dict[str, dict[str, Array]]:
    """Return per bound its mean slack in nats and, per tolerance, the share of blocks opened and unread / tolerance.

    The unread mass is that of the query head which has most of it. The oracle needs no slack against rounding.
    """
    filled = blocks.view.num_tokens > 0
    count = jnp.sum(filled, dtype=jnp.float32)
    found = {}
    for name, interval in intervals(blocks).items():
        selector = Certified(lambda _, given=interval: given, slack=0.0 if name == "exact" else 1e-3)

        def at(tolerance: Array, selector=selector) -> tuple[Array, Array]:
            opened = selector(tolerating(blocks.view, tolerance)) & filled
            unread = jnp.max(jnp.sum(jnp.where(opened, 0.0, blocks.share), axis=-1))
            return jnp.sum(opened, dtype=jnp.float32) / count, unread / tolerance

        opened, ratio = jax.vmap(at)(jnp.array(TOLERANCES, jnp.float32))
        gap = jnp.where(filled, interval.high - blocks.log_mass, 0.0)
        slack = jnp.sum(gap) / (count * gap.shape[0])
        found[name] = {"slack": slack, "opened": opened, "ratio": ratio}
    return found


def residual_errors(blocks: CapturedBlocks) -> Float[Array, "e f"]:
    """Return |o~ - o| / |o| per share of blocks open, those of most mass, and per estimate of the rest.

    The rest is dropped; or stands as n e^{q . mean key} times its mean value; or as its true mass times that.
    """
    view = blocks.view
    log_count = jnp.log(view.num_tokens.astype(jnp.float32))  # -inf where a block holds nothing
    log_whole = jax.nn.logsumexp(blocks.log_mass, axis=-1, keepdims=True)
    estimate = jnp.exp(log_count + view.middle - log_whole)
    whole = jnp.sum(blocks.output, axis=1)
    num_held = jnp.sum(view.num_tokens > 0, dtype=jnp.float32)
    rank = jnp.argsort(jnp.argsort(-blocks.log_mass, axis=-1), axis=-1)
    errors = []
    for share in SHARES:
        opened = rank < jnp.ceil(share * num_held).astype(jnp.int32)
        read = jnp.sum(jnp.where(opened[..., None], blocks.output, 0.0), axis=1)
        for rest in (jnp.zeros_like(estimate), estimate, blocks.share):
            weight = jnp.where(opened, 0.0, rest)
            total = jnp.sum(jnp.where(opened, blocks.share, weight), axis=1, keepdims=True)
            guess = (read + weight @ view.value_mean) / total
            errors.append(jnp.linalg.norm(guess - whole, axis=-1) / jnp.linalg.norm(whole, axis=-1))
    return jnp.mean(jnp.stack(errors), axis=-1).reshape(len(SHARES), len(ESTIMATES))


@partial(jax.jit, static_argnums=0)
def measure_layer(page_size: int, q: Array, k: Array, v: Array, positions: Array) -> tuple[Any, Array]:
    """Return `choices` and `residual_errors` of every position and KV head of one layer."""
    heads = k.shape[1]
    grouped = q.reshape(q.shape[0], heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5

    def at(position: Array, query: Array, key: Array, value: Array) -> tuple[Any, Array]:
        blocks = blocks_at(query, key, value, position, page_size)
        return choices(blocks), residual_errors(blocks)

    over_heads = jax.vmap(at, in_axes=(None, 0, 1, 1))
    return jax.vmap(over_heads, in_axes=(0, 0, None, None))(positions, grouped[positions], k, v)


def measure(model: Model, tokens: np.ndarray, page_size: int, num_queries: int) -> dict[str, Any]:
    """Return the figures of one model and page size, over rows "r t" of tokens and every layer and KV head."""
    length = tokens.shape[1]
    positions = jnp.linspace(3 * length // 4, length - 1, num_queries).astype(jnp.int32)
    seen = []  # rows, layers
    for row in tokens:
        _, layers = capture(model.config, model.params, jnp.asarray(row))
        seen.append([jax.device_get(measure_layer(page_size, *layer, positions)) for layer in layers])
    found, errors = jax.tree.map(lambda *leaves: np.stack(leaves), *[jax.tree.map(_stack, *row) for row in seen])
    rows_ = []
    for name in BOUNDS:
        opened, ratio = found[name]["opened"], found[name]["ratio"]  # row, layer, position, KV head, tolerance
        rows_.append(
            {
                "bound": name,
                "slack": float(found[name]["slack"].mean()),
                "largest_unread_over_tolerance": float(ratio.max()),
                "opened": dict(zip(map(str, TOLERANCES), opened.mean((0, 1, 2, 3)).tolist(), strict=True)),
                "opened_by_layer_at_0.1": opened.mean((0, 2, 3))[:, TOLERANCES.index(0.1)].tolist(),
            }
        )
    residual = [
        {"open": share, "estimate": name, "relative_error": float(errors[..., i, j].mean())}
        for i, share in enumerate(SHARES)
        for j, name in enumerate(ESTIMATES)
    ]
    return {"page_size": page_size, "context": length, "bounds": rows_, "residual": residual}


def _stack(*leaves: np.ndarray) -> np.ndarray:
    return np.stack(leaves)


def measure_case(name: str, text: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model on one text."""
    model = load(name, dtype="float32", max_num_seqs=2)
    c = model.config
    tokens = rows(model, text, args.rows, c.max_positions)
    heads = f"{c.num_heads} query heads on {c.num_kv_heads} of {c.head_dim}"
    return {
        "model": Path(name).name,
        "shape": f"{c.num_layers} layers, {heads}, context {c.max_positions}",
        "text": text.name,
        "page_sizes": [measure(model, tokens, size, args.queries) for size in args.page_sizes],
    }


def main() -> None:
    parser = arguments.parser(__doc__, "case", results="bounds.json")
    parser.add_argument("--page-sizes", type=arguments.count(), nargs="+", default=[16, 8])
    parser.add_argument("--rows", type=arguments.count(), default=5, help="rows of text at full context (default 5)")
    parser.add_argument("--queries", type=arguments.count(), default=32, help="query positions of a row (default 32)")
    args = parser.parse_args()
    cases = []
    with arguments.refusals("measure_bounds"):
        for name, text in args.case:
            cases.append(measure_case(name, Path(text), args))
            print(f"\n{tables.bounds(cases[-1:])}", flush=True)
    settings = {"rows": args.rows, "queries_per_row": args.queries, "tolerances": TOLERANCES, "dtype": "float32"}
    write(args.output, "scripts/measure_bounds.py", settings, cases=cases)
    ratios = [row["largest_unread_over_tolerance"] for c in cases for size in c["page_sizes"] for row in size["bounds"]]
    if max(ratios) > ALLOWED:
        sys.exit(f"measure_bounds: {max(ratios):.4f} times the tolerance was left unread; a bound does not hold")


if __name__ == "__main__":
    main()
