"""A model run over given text, reading less: all measured tokens of a row at once, each with blocks of its own.

The decoder takes a token a step; here a layer meets every measured token together, which is the same arithmetic where
the text is given: a token's keys and values depend on the tokens before it and on what they read, layer by layer. It
shares a selector's code with the decoder and nothing else, so that each is a check of the other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import bounds
from et_jax.control.select import fewest
from et_jax.control.selector import Selector
from et_jax.control.view import BlockView, attention_entropy, tail
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.models.transformer import forward
from et_jax.softmax import Softmax
from et_jax.tasks.calibration import require_plain_attention
from et_jax.types import Number, pytree, replace, static, value

HIGHEST = jax.lax.Precision.HIGHEST


@value
class Arm:
    """A way of reading less: a selector, and whether unread blocks count as their mean value.

    With `oracle` the selector is not asked: of every head the fewest blocks are read without which its
    tolerance is not passed, by their true effect on its output (see `_effect`).
    """

    selector: Selector
    residual: Number = 0.0
    oracle: bool = static(default=False)


@pytree
class ForcedText:
    """Rows of text on which arms are compared: `start` tokens read densely, then those measured, "*r m".

    `following` are the tokens after them; `keys` and `values` those of the first tokens, layer by layer;
    `log_probs` the dense model's, in nats. `*r` is none where one row is spoken of.
    """

    measured: Int[Array, "*r m"]
    following: Int[Array, "*r m"]
    keys: tuple[Float[Array, "*r p k d"], ...]
    values: tuple[Float[Array, "*r p k d"], ...]
    log_probs: Float[Array, "*r m v"]


@pytree
class Score:
    """What an arm gave: nats of KL from dense and of loss, agreement of the likeliest token, "*r m".

    `margin` is how far the likeliest logit stands above the next. `read` of `held` blocks were read, over layers and
    KV heads; `entropy` is each query head's attention entropy, of the masses as the selector guesses them.
    """

    divergence: Float[Array, "*r m"]
    loss: Float[Array, "*r m"]
    agrees: Bool[Array, "*r m"]
    margin: Float[Array, "*r m"]
    read: Int[Array, "*r m"]
    held: Int[Array, "*r m"]
    entropy: Float[Array, "*r l m k g"]


def text(config: ModelConfig, params: Params, tokens: Int[Array, "r t"], start: int) -> ForcedText:
    """Return rows to be measured from token `start` on.

    Raises ValueError for a model with sliding windows, of which a block would be seen in part, soft caps or sinks.
    """
    require_plain_attention(config)
    given = tokens[:, :-1]

    def dense(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
        out = jax.nn.dot_product_attention(q, k, v, scale=softmax.scale, is_causal=True)
        return out, (*memory, (k[0, :start], v[0, :start]))

    @jax.jit
    def one(row: Int[Array, " t"]) -> tuple[Array, tuple]:
        with jax.default_matmul_precision("highest"):
            logits, layers = forward(params, config, row[None], jnp.arange(row.shape[0])[None], dense, ())
        return jax.nn.log_softmax(logits[0, start:]), layers

    log_probs, layers = jax.lax.map(one, given)
    return ForcedText(
        measured=given[:, start:],
        following=tokens[:, start + 1 :],
        keys=tuple(k for k, _ in layers),
        values=tuple(v for _, v in layers),
        log_probs=log_probs,
    )


@partial(jax.jit, static_argnames=("config", "page_size"))
def run(
    config: ModelConfig,
    params: Params,
    text: ForcedText,
    arm: Arm,
    tolerance: Float[Array, ""],
    factors: Float[Array, "r l m k g"],
    sensitivity: Float[Array, "l k g"],
    *,
    page_size: int,
) -> Score:
    """Return what an arm gives of a model that is so sensitive to its heads, each at `tolerance` times its factor."""

    def one(row: tuple[ForcedText, Array]) -> Score:
        line, factor = row
        start, count = line.keys[0].shape[0], line.measured.shape[0]
        positions = start + jnp.arange(count, dtype=jnp.int32)

        def attend(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
            key, val = (jnp.concatenate([old[layer], new[0]]) for old, new in ((line.keys, k), (line.values, v)))
            grouped = q[0].reshape(count, config.num_kv_heads, config.group_size, -1) * softmax.scale
            heads = _Head(
                query=grouped.swapaxes(0, 1),
                key=_in_blocks(key, page_size),
                value=_in_blocks(val, page_size),
                factor=factor[layer].swapaxes(0, 1),
                sensitivity=sensitivity[layer] * sensitivity.size,
            )
            read_head = partial(_read, arm, positions, tolerance)
            out, opened, entropy = jax.vmap(read_head, out_axes=1)(heads)
            noted = jnp.sum(opened, axis=(1, 2), dtype=jnp.int32), entropy
            return out.reshape(q.shape), (*memory, noted)

        nothing: tuple[Any, ...] = ()
        with jax.default_matmul_precision("highest"):
            logits, layers = forward(params, config, line.measured[None], positions[None], attend, nothing)
        got = jax.nn.log_softmax(logits[0])
        true = line.log_probs
        return Score(
            divergence=jnp.sum(jnp.exp(true) * (true - got), axis=-1),
            loss=-jnp.take_along_axis(got, line.following[:, None], axis=-1)[:, 0],
            agrees=jnp.argmax(true, axis=-1) == jnp.argmax(got, axis=-1),
            margin=jnp.subtract(*jnp.moveaxis(jax.lax.top_k(got, 2)[0], -1, 0)),
            read=sum(read for read, _ in layers),
            held=(positions // page_size + 1) * config.num_kv_heads * config.num_layers,
            entropy=jnp.stack([entropy for _, entropy in layers]),
        )

    return jax.lax.map(one, (text, factors))


@pytree
class _Head:
    """A KV head of a layer: every measured token's queries, keys and values in blocks, factors of the tolerance."""

    query: Float[Array, "*k m g d"]
    key: Float[Array, "*k n s d"]
    value: Float[Array, "*k n s d"]
    factor: Float[Array, "*k m g"]
    sensitivity: Float[Array, "*k g"]


def _in_blocks(x: Float[Array, "t k d"], page_size: int) -> Float[Array, "k n s d"]:
    x = jnp.pad(x, ((0, -x.shape[0] % page_size), (0, 0), (0, 0)))
    return x.reshape(-1, page_size, *x.shape[1:]).transpose(2, 0, 1, 3)


def _read(
    arm: Arm, positions: Int[Array, " m"], tolerance: Float[Array, ""], head: _Head
) -> tuple[Float[Array, "m g d"], Bool[Array, "m n"], Float[Array, "m g"]]:
    """One KV head: the mixed values of every measured token, the blocks it read, and its heads' attention entropy."""
    view, score = _views(positions, tolerance, head)
    needs = arm.selector.needs
    asked = replace(
        view,
        coded=view.coded if "codes" in needs else None,
        sensitivity=view.sensitivity if "sensitivity" in needs else None,
    )
    chosen = jax.vmap(arm.selector.choose)(asked)
    held = view.num_tokens > 0
    opened = chosen.opened
    if arm.oracle:
        effect = _effect(score, head.value, view, chosen.estimate, arm.residual)
        opened = jax.vmap(fewest)(view, head.sensitivity[:, None] * jnp.square(effect))
    opened = (opened | jax.vmap(tail)(view)) & held
    seen = jnp.where(opened[:, None, :, None], score, -jnp.inf)
    log_read = jax.nn.logsumexp(seen, axis=(2, 3))
    left = jnp.where((held & ~opened)[:, None], chosen.estimate, -jnp.inf)
    left = jnp.where(arm.residual > 0, left, -jnp.inf)
    whole = jnp.logaddexp(log_read, jax.nn.logsumexp(left, axis=-1))
    out = jnp.einsum("mgns,nsd->mgd", jnp.exp(seen - whole[..., None, None]), head.value, precision=HIGHEST)
    out += jnp.einsum("mgn,mnd->mgd", jnp.exp(left - whole[..., None]), view.value_mean, precision=HIGHEST)
    return out, opened, attention_entropy(chosen.estimate, held[:, None])


def _effect(
    score: Float[Array, "m g n s"],
    val: Float[Array, "n s d"],
    view: BlockView,
    estimate: Float[Array, "m g n"],
    residual: Number,
) -> Float[Array, "m g n"]:
    """How far a head's output would move were one block alone not read.

    With a_b the block's true share of the mass, v_b its own output, o the whole one: a_b |v_b - o| / (1 - a_b)
    where it is dropped; |a_b v_b - c_b u_b - (a_b - c_b) o| / (1 - a_b + c_b) where its mean value u_b stands for
    it, at its estimated share c_b.
    """
    whole = jax.nn.logsumexp(score, axis=(2, 3), keepdims=True)
    weight = jnp.exp(score - whole)
    share, part = jnp.sum(weight, axis=-1), jnp.einsum("mgns,nsd->mgnd", weight, val, precision=HIGHEST)
    guess = jnp.where(residual > 0, jnp.exp(jnp.minimum(estimate - whole[..., 0], 0.0)), 0.0)
    guess = jnp.where((view.num_tokens > 0)[:, None], guess, 0.0)
    mean = view.value_mean[:, None]
    out = jnp.sum(part, axis=2, keepdims=True)
    moved = part - guess[..., None] * mean - (share - guess)[..., None] * out
    return jnp.linalg.norm(moved, axis=-1) / jnp.maximum(1.0 - share + guess, 1e-9)


def _views(
    positions: Int[Array, " m"], tolerance: Float[Array, ""], head: _Head
) -> tuple[BlockView, Float[Array, "m g n s"]]:
    """What a selector sees at every position, and the true scores, -inf beyond the position.

    Whole blocks are summarised once. The block a position lies in is summarised up to it.
    """
    query, key, val = head.query, head.key, head.value
    (n, s, _), m = key.shape, positions.shape[0]
    at, offset, block = positions // s, positions % s, jnp.arange(n)
    ends = block == at[:, None]
    upto = jnp.arange(1, s + 1, dtype=jnp.float32)[:, None]

    def summaries(running: Float[Array, "n s d"]) -> Float[Array, "m n d"]:
        return jnp.where(ends[..., None], running[at, offset][:, None], running[:, -1])

    key_min, key_max = (summaries(f(key, axis=1)) for f in (jax.lax.cummin, jax.lax.cummax))
    key_mean, value_mean = (summaries(jnp.cumsum(x, axis=1) / upto) for x in (key, val))
    score = jnp.einsum("mgd,nsd->mgns", query, key, precision=HIGHEST)
    score = jnp.where((block[:, None] * s + jnp.arange(s) <= positions[:, None, None])[:, None], score, -jnp.inf)
    up, down = jnp.maximum(query, 0), jnp.minimum(query, 0)

    def times(q: Float[Array, "m g d"], each: Float[Array, "m n d"]) -> Float[Array, "m g n"]:
        return jnp.einsum("mgd,mnd->mgn", q, each, precision=HIGHEST)

    box = bounds.Interval(low=times(up, key_min) + times(down, key_max), high=times(up, key_max) + times(down, key_min))
    num_tokens = jnp.clip(positions[:, None] + 1 - block * s, 0, s)
    held = (num_tokens > 0)[:, None]

    # Codes lie in the boxes of whole blocks; the tail's mass is known, so none are made for a part of a block.
    step, middle = bounds.code_scale(key.min(axis=1), key.max(axis=1))
    code = jnp.clip(jnp.round((key - middle[:, None]) / jnp.where(step > 0, step, 1.0)[:, None]), -128, 127)
    copies = code * step[:, None] + middle[:, None]
    coded = jax.nn.logsumexp(jnp.einsum("mgd,nsd->mgns", query, copies, precision=HIGHEST), axis=-1)
    error = jnp.einsum("mgd,nd->mgn", jnp.abs(query), step / 2, precision=HIGHEST)
    log_mass = jax.nn.logsumexp(score, axis=-1)
    apart = jnp.linalg.norm(val[None] - value_mean[:, :, None], axis=-1)
    view = BlockView(
        query=query,
        score=box,
        middle=times(query, key_mean),
        key_min=key_min,
        key_max=key_max,
        key_mean=key_mean,
        value_mean=value_mean,
        value_radius=jnp.max(jnp.where(jnp.isfinite(score[:, 0]), apart, 0.0), axis=-1),
        start=jnp.broadcast_to(block * s, (m, n)).astype(jnp.int32),
        num_tokens=num_tokens.astype(jnp.int32),
        length=positions + 1,
        tolerance=jnp.broadcast_to(tolerance, m),
        head_tolerance=tolerance * head.factor,
        sensitivity=jnp.broadcast_to(head.sensitivity, head.factor.shape),
        tail_log_mass=jnp.take_along_axis(log_mass, at[:, None, None], axis=-1)[..., 0],
        coded=bounds.Interval(
            low=jnp.where(held, coded - error, -jnp.inf), high=jnp.where(held, coded + error, -jnp.inf)
        ),
    )
    return view, score
