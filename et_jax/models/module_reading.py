"""Checks a module before serving it: its shape, and that its attention equals the decoder's.

The module is run on random tokens. Behaviour beyond their number, such as a longer window, is not tested.
"""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.errors import UsageError
from et_jax.models import calls
from et_jax.models.module import (
    AttentionFn,
    ModuleConfig,
    ModuleModel,
    ModuleWeights,
    attending,
    called,
    forward,
    with_attention,
)
from et_jax.softmax import Softmax

_LENGTH = 128  # the most tokens that a module is compared on
_TOLERANCE = {"float32": 1e-3, "bfloat16": 4e-2}  # relative to the largest value compared, by the dtype of keys
_OWN = (
    "the decoder supports softmax(q k / sqrt(head_dim)) over all tokens so far, without bias, window or another scale, "
    "and rotary positions are applied before attention_fn is called"
)


def read_module(module: Any, config: ModuleConfig) -> tuple[ModuleModel, ModuleWeights]:
    """Return a module as part of a program, and its arrays; `module` itself is unchanged.

    It is read as after `module.eval()`, run once to determine its shape and once to compare it with the decoder's
    version of it. Raises UsageError, one sentence, for an unsupported module.
    """
    name = type(module).__name__
    graphdef, weights = _split(module, name)
    found = _traced(graphdef, weights, config, name)
    config.calibration.check(found)
    _compare(found, weights, config)
    return found, weights


def _split(module: Any, name: str) -> tuple[Any, ModuleWeights]:
    """Return the module split in two, in the state of `eval`, all of it on one device."""
    from flax import nnx

    copy = nnx.clone(module)
    copy.eval()
    if not any(attending(copy)):
        raise UsageError(
            f"{name} has no part with an attention_fn; have its attention layers call self.attention_fn(q, k, v), as "
            "nnx.MultiHeadAttention does."
        )
    graphdef, state = nnx.split(copy)
    if jax.tree.leaves(nnx.filter_state(state, nnx.Cache)):
        raise UsageError(f"{name} has its own cache; make it with decode=False, because the decoder provides one.")
    leaves = jax.tree.leaves(state)
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        raise UsageError(f"{name} has uninitialised weights; initialise it first.")
    devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    if len(devices) > 1:
        raise UsageError(f"{name} is on {len(devices)} devices; put all of its weights on one.")
    try:
        hash(graphdef)
    except TypeError as error:
        raise UsageError(
            f"{name} has an attribute that cannot be hashed ({error}); make it a tuple, or an nnx.Variable."
        ) from error
    return graphdef, ModuleWeights(state=jax.device_put(state, devices.pop() if devices else None))


def _traced(graphdef: Any, weights: ModuleWeights, config: ModuleConfig, name: str) -> ModuleModel:
    """Return the module's shape, from tracing it on two rows of tokens."""
    from flax import nnx

    def attention(query: Array, key: Array, value: Array, bias: Any = None, *_: Any, **__: Any) -> Array:
        if bias is not None:
            raise UsageError(f"{name} puts a bias on the scores of its attention; {_OWN}.")
        return called(query, key, value)

    def run(weights: ModuleWeights, tokens: Array, positions: Array) -> Any:
        return with_attention(nnx.merge(graphdef, weights.state), lambda _: attention)(tokens, positions)

    shape = 2, min(8, config.max_positions)
    given = jax.ShapeDtypeStruct(shape, jnp.int32)
    with _calling(name):
        jaxpr, logits = jax.make_jaxpr(run, return_shape=True)(weights, given, given)
        met = [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call) for call in calls.calls(jaxpr)]
    if not met:
        raise UsageError(f"{name} does not call the attention_fn of any of its parts; have its layers call it.")
    if not hasattr(logits, "shape") or logits.shape[:2] != shape or len(logits.shape) != 3:
        got = list(logits.shape) if hasattr(logits, "shape") else type(logits).__name__
        raise UsageError(
            f"{name} returns {got} for tokens of {list(shape)}; it must return logits [batch, length, vocabulary]."
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise UsageError(f"{name} returns {logits.dtype}; logits are real numbers, before any softmax or argmax.")
    vocab_size = logits.shape[2]
    numbers = _products(jaxpr.jaxpr, math.prod(shape))
    return ModuleModel(
        architecture=name,
        vocab_size=vocab_size,
        max_positions=config.max_positions,
        **_heads(met, shape, name),
        graphdef=graphdef,
        num_weights=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)),
        weight_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)),
        num_multiplied=sum(multiplied for multiplied, _ in numbers),
        widest=max((wide for _, wide in numbers if wide != vocab_size), default=vocab_size),
    )


def _heads(met: list[tuple[Any, ...]], shape: tuple[int, int], name: str) -> dict[str, Any]:
    """Return the layers and heads from the calls of attention, which must all have equal shapes."""
    query, key, value = met[0]
    if any(call != met[0] for call in met):
        raise UsageError(f"{name} has layers with different heads; the decoder requires layers with equal heads.")
    fits = len(query.shape) == len(key.shape) == 4 and query.shape[:2] == key.shape[:2] == shape
    if not fits or key.shape != value.shape or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise UsageError(
            f"{name} calls attention_fn with queries {list(query.shape)}, keys {list(key.shape)} and values "
            f"{list(value.shape)}; they must be [batch, length, heads, head_dim] of the tokens given, keys and values "
            "of as many heads, or of a divisor."
        )
    dtype = jnp.dtype(key.dtype)
    if dtype.name not in _TOLERANCE:
        raise UsageError(f"{name} has keys in {dtype.name}; the decoder supports {' and '.join(_TOLERANCE)}.")
    return {
        "num_layers": len(met),
        "num_heads": query.shape[2],
        "num_kv_heads": key.shape[2],
        "head_dim": key.shape[3],
        "windows": (None,) * len(met),
        "dtype": dtype,
    }


def _products(jaxpr: Any, tokens: int) -> list[tuple[int, int]]:
    """Return, for every matrix product on `tokens` tokens, the number of its weights and of its results."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            out = math.prod(equation.outvars[0].aval.shape)
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            found.append((out * summed // tokens, out // tokens))
        for inner in calls.inner_programs(equation):
            found += _products(inner, tokens)
    return found


def _compare(model: ModuleModel, weights: ModuleWeights, config: ModuleConfig) -> None:
    """Raise UsageError if the module's own pass differs from the decoder's.

    The decoder's is causal attention, over the sequence at once and in three parts, the last a single token, batched.
    """
    length = min(_LENGTH, config.max_positions)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, (1, length)), jnp.int32)
    with _calling(model.architecture), jax.default_matmul_precision("highest"):
        own, outs, changed = jax.jit(partial(_own, model))(weights, tokens)
        _check_own(model, own[0], length, changed)
        parts = jax.jit(partial(_in_parts, model))(weights, tokens)
    tolerance = _TOLERANCE[jnp.dtype(model.dtype).name]
    if not _near([own for own, _ in outs], [plain for _, plain in outs], tolerance):
        raise UsageError(f"{model.architecture} uses another kind of attention; {_OWN}.")
    if not _near(own, parts, tolerance):
        raise UsageError(
            f"{model.architecture} returns other logits for a sequence processed in parts; outside of attention each "
            "token must be processed independently, at its given position."
        )


def _check_own(model: ModuleModel, logits: Array, length: int, changed: dict[str, Array]) -> None:
    """Raise UsageError if the module's own pass has invalid logits, or changed one of its variables."""
    if written := [path for path, is_other in changed.items() if is_other]:
        raise UsageError(
            f"{model.architecture} changes its {min(written)} when it is called; the decoder requires a pure module."
        )
    if logits.shape != (1, length, model.vocab_size):
        raise UsageError(
            f"{model.architecture} returns {list(logits.shape)} for tokens of [1, {length}]; it must return logits "
            "[batch, length, vocabulary] of tokens of any length."
        )
    if jnp.isnan(logits).any():
        raise UsageError(f"{model.architecture} returns logits that are not numbers; look for NaN in its weights.")


def _own(model: ModuleModel, weights: ModuleWeights, tokens: Array) -> tuple[Any, list[Any], dict[str, Array]]:
    """Return the module's logits, its own and the causal result of every call of attention, and which arrays changed.

    The last maps the paths of arrays to a bool each.
    """
    from flax import nnx

    inputs: list[tuple[Array, Array, Array]] = []
    outs: list[tuple[Array, Array]] = []

    def watched(own: AttentionFn) -> AttentionFn:
        def attention(query: Array, key: Array, value: Array, *others: Any, **settings: Any) -> Array:
            return calls.marked(query, key, value, own(query, key, value, *others, **settings))

        return attention

    def seen(query: Array, key: Array, value: Array, own: Array) -> Array:
        inputs.append((query, key, value))
        outs.append((own, causal(query, key, value)))
        return own

    def called(state: Any, tokens: Array, positions: Array) -> tuple[Array, dict[str, Array]]:
        module = with_attention(nnx.merge(model.graphdef, state), watched)
        return module(tokens, positions), _arrays(module)

    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    logits, after = calls.run(called, seen, weights.state, tokens, positions)
    before = _arrays(nnx.merge(model.graphdef, weights.state))
    changed = {path: _differs(before.get(path), after.get(path)) for path in before.keys() | after.keys()}
    return (logits, inputs), outs, changed


def _differs(one: Array | None, other: Array | None) -> Array:
    """Return whether a variable changed its value, was removed, or was added."""
    if one is None or other is None:
        return jnp.bool(one is not other)
    if one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
        return jnp.bool(one is not other)
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return ~jnp.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact))


def _in_parts(model: ModuleModel, weights: ModuleWeights, tokens: Array) -> Any:
    """Return the logits of `_own`, computed part by part beside another sequence, with a cache between parts."""
    length = tokens.shape[1]
    both = jnp.concatenate([tokens, tokens[:, ::-1]])
    ends = sorted({length // 2, length - 1, length} - {0})

    def attend(layer: int, q: Array, k: Array, v: Array, memory: tuple, softmax: Softmax) -> tuple[Array, tuple]:
        cached = memory[layer] if layer < len(memory) else (q[:, :0], k[:, :0], v[:, :0])
        q_all, k_all, v_all = (jnp.concatenate([old, new], axis=1) for old, new in zip(cached, (q, k, v), strict=True))
        memory = (*memory[:layer], (q_all, k_all, v_all), *memory[layer + 1 :])
        return causal(q, k_all, v_all), memory

    logits, memory = [], ()
    for start, end in zip((0, *ends), ends, strict=False):
        positions = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32), (2, end - start))
        part, memory = forward(weights, model, both[:, start:end], positions, attend, memory)
        logits.append(part)
    return jax.tree.map(lambda x: x[:1], (jnp.concatenate(logits, axis=1), list(memory)))


def causal(
    query: Float[Array, "b t h d"], key: Float[Array, "b s k d"], value: Float[Array, "b s k d"]
) -> Float[Array, "b t h d"]:
    """Return softmax(q k / sqrt(d)) v of the last `t` of `s` tokens, each of which attends up to itself."""
    (t, h, d), (s, k) = query.shape[1:], key.shape[1:3]
    key, value = (jnp.repeat(x.astype(jnp.float32), h // k, axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query.astype(jnp.float32), key) / d**0.5
    seen = jnp.arange(s) <= jnp.arange(t)[:, None] + (s - t)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, value).astype(query.dtype)


def _near(some: Any, others: Any, tolerance: float) -> bool:
    """Return whether all arrays of two trees agree to a share of their largest value; NaN agrees with nothing.

    Logits of -inf agree with each other.
    """
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    for one, other in ((np.asarray(one, np.float32), np.asarray(other, np.float32)) for one, other in pairs):
        finite = np.isfinite(one)
        largest = np.abs(one[finite]).max(initial=0.0)
        if not (one[~finite] == other[~finite]).all():
            return False
        if not (np.abs(one[finite] - other[finite]) <= tolerance * largest).all():
            return False
    return True


def _arrays(module: Any) -> dict[str, Array]:
    """Return the arrays of a module by their paths in it."""
    from flax import nnx

    leaves = jax.tree.leaves_with_path(nnx.state(module))
    return {jax.tree_util.keystr(path[:-1], simple=True, separator="/"): leaf for path, leaf in leaves}


@contextlib.contextmanager
def _calling(name: str) -> Iterator[None]:
    """Convert an error of the caller's code into a UsageError that it cannot be called; pass on a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        raise UsageError(
            f"{name} cannot be called as module(tokens, positions) on integers [batch, length] "
            f"({type(error).__name__}: {reason})."
        ) from error
