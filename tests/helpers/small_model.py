"""A small model with random weights, driven through the decoder, and the dense model it must agree with."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode import request as decoding
from et_jax.decode.config import DecoderConfig
from et_jax.models.config import ModelConfig
from et_jax.models.stacks import located, stacks_of
from et_jax.models.transformer import forward, initialise
from et_jax.serve.chunks import calls
from et_jax.types import replace
from scripts.measuring.shapes import SMALL

PAGE, CHUNK, LENGTH = 4, 8, 64
POOL = 25  # 24 pages for three slots of up to sixteen blocks
MODEL = dataclasses.replace(SMALL, max_positions=LENGTH)
VOCABULARY = MODEL.vocab_size
NARROW = dataclasses.replace(MODEL, windows=(6, None))
OTHER = dataclasses.replace(MODEL, num_layers=1, num_heads=2, num_kv_heads=1)


@functools.cache
def weights(dtype=jnp.float32, model=MODEL):
    """Random weights, larger than a model's first ones so that attention shows in the logits."""
    drawn = initialise(model, jax.random.key(int(model == OTHER)), dtype)
    return jax.tree.map(lambda x: x * jnp.asarray(8 if x.ndim > 1 else 1, dtype), drawn)


def configuration(**changes) -> DecoderConfig:
    plain = dict(
        model=MODEL,
        num_slots=3,
        batch=3,
        page_size=PAGE,
        num_pages=POOL,
        max_length=LENGTH,
        prefill_batch=CHUNK,
        chunk=CHUNK,
        max_steps=32,
        cache_dtype=jnp.float32,
        backend="xla",
    )
    return DecoderConfig(**plain | changes)


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(1, VOCABULARY, length).tolist()


def given(params) -> tuple:
    """The weights of a decoder's models, where there is one too."""
    return params if isinstance(params, tuple) else (params,)


def fill(d, params, state, slot: int, tokens: list[int]):
    """Write a prompt but for its last token, chunk by chunk."""
    for rows in calls(d.config, slot, tokens[:-1]):
        state, granted = d.prefill(given(params), state, *rows)
        assert granted.all()
    return state


def start(d, params, state, slot: int, tokens: list[int], **asked):
    state = fill(d, params, state, slot, tokens)
    return d.insert(state, slot, decoding.request(d.config, tokens, **{"limit": 12} | asked))


def run(d, params, state, steps: int = 32):
    """Decode, and return the state and the rows of the output of each slot, those produced."""
    state, output, ran = d.decode(given(params), state, steps)
    return state, produced(output, int(ran))


def produced(output, ran: int) -> dict:
    """Return the rows of each slot of the output of so many steps: those of the tokens that were produced."""
    host = jax.tree.map(
        lambda x: np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)[:ran].reshape(-1, *x.shape[2:]),
        output,
    )
    places = {slot: np.flatnonzero(host.produced[:, slot]) for slot in range(host.produced.shape[1])}
    return {slot: jax.tree.map(lambda x, slot=slot, at=at: x[at, slot], host) for slot, at in places.items()}


def texts(rows) -> dict[int, list[int]]:
    return {slot: row.token.tolist() for slot, row in rows.items()}


def text_of(d, params, slot: int, tokens: list[int], **asked) -> list[int]:
    """The text of one sequence that has the decoder to itself."""
    return texts(run(d, params, start(d, params, d.empty(), slot, tokens, **asked))[1])[slot]


def stored(state, model: ModelConfig, slot: int, number: int) -> tuple:
    """The cache that has a layer's pages, and the numbers of a slot's pages there."""
    layer = located(stacks_of(model), number)
    cached = state.plants[0].cache.layers[layer.place]
    return cached, np.asarray(cached.numbers(state.table.pages[slot], layer.turn))


def same_bits(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@functools.cache
def dense_forward(model: ModelConfig):
    """`forward` with plain attention over a whole sequence, of which a layer's heads read what `reads[layer]` says.

    It returns logits, the least share over heads of the mass on what is read, and queries and keys of every layer.
    """

    def attend_to(reads):
        def attend(layer, q, k, v, memory, softmax):
            (kept, others), own = memory, (q[0], k[0])
            k, v = (jnp.repeat(x, model.group_size, axis=2) for x in (k, v))
            scores = jnp.einsum("bihd,bjhd->bhij", q, k) * np.float32(softmax.scale)
            if softmax.soft_cap is not None:
                scores = softmax.soft_cap * jnp.tanh(scores / softmax.soft_cap)
            behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
            seen = (behind >= 0) & (behind < (model.windows[layer] or LENGTH))
            whole = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
            share = jnp.sum(jnp.where(reads[layer], whole, 0.0), axis=-1)[0].min(axis=0)
            weights = jax.nn.softmax(jnp.where(reads[layer], scores, -jnp.inf))
            return jnp.einsum("bhij,bjhd->bihd", weights, v), (jnp.minimum(kept, share), (*others, own))

        return attend

    def run(params, tokens, reads):
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        return forward(params, model, tokens[None], positions, attend_to(reads), (jnp.ones(LENGTH), ()))

    return jax.jit(run)


def dense(params, model: ModelConfig, tokens: list[int], opened=None):
    """Logits of the dense model, and the least share over heads of the attention mass on what each query reads.

    `opened(layer, i)` gives the positions the query at position i reads; all before it if None.
    """
    t = len(tokens)
    reads = np.tile(np.eye(LENGTH, dtype=bool), (model.num_layers, 1, 1))  # the padding reads itself
    for layer, i in itertools.product(range(model.num_layers), range(t)):
        window = model.windows[layer] or t
        seen = range(i + 1) if opened is None else opened(layer, i)
        reads[layer, i, [j for j in seen if i - window < j <= i]] = True
    padded = jnp.asarray(tokens + [0] * (LENGTH - t), jnp.int32)
    logits, (kept, _) = dense_forward(model)(params, padded, jnp.asarray(reads))
    return np.asarray(logits[0, :t], np.float64), np.asarray(kept[:t])


PROMPTS = {0: prompt(0, 11), 1: prompt(1, 1), 2: prompt(2, 21)}  # two chunks, none, three


def begun(d, params, asked):
    """Return the state in which every prompt is read and its sequence begins, with what `asked` says of its slot."""
    state = d.empty()
    for slot, tokens in PROMPTS.items():
        state = fill(d, params, state, slot, tokens)
        state = d.insert(state, slot, decoding.request(d.config, tokens, **asked(slot)))
    return state


def paged_texts(d, params, **asked):
    return run(d, params, begun(d, params, lambda slot: {"limit": 12} | asked))[1]


# A user's own law, temperature rule and selector.


def by_entropy(signals, state):
    return replace(state, temperature=0.5 + 0.1 * signals.entropy)


def a_little_warmer(moments_at, signals, state):
    entropy, _ = moments_at(jnp.float32(1.0))
    return state.temperature + 0.01 * entropy


def even_blocks(view):
    return (view.start // PAGE) % 2 == 0
