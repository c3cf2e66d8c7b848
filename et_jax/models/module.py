"""A model written as a `flax.nnx.Module`: called unchanged, with its attention replaced by the decoder's."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.models import calls
from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelShape
from et_jax.models.transformer import Attend
from et_jax.types import pytree

Memory = TypeVar("Memory")
_MAX_POSITIONS, _MAX_ID = 2**30, 2**31 - 1

AttentionFn = Callable[..., Array]
"""Attention as `nnx.MultiHeadAttention` calls it: query, key and value [b, t, heads, head_dim], and keywords."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """What a module does not reveal.

    It reads at most `max_positions` tokens. `bos_token_id` and `eos_token_ids` override those of the tokenizer;
    None uses the tokenizer's. `calibration` has measurements of the module, its sensitivity by
    `models.sensitivity.head_sensitivity`; None means none. Raises UsageError for a field of the wrong
    type.
    """

    max_positions: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    def __post_init__(self) -> None:
        values.fill_unset(self)
        checked = {"max_positions": values.integer("max_positions", self.max_positions, 2, _MAX_POSITIONS)}
        if self.bos_token_id is not None:
            checked["bos_token_id"] = values.integer("bos_token_id", self.bos_token_id, 0, _MAX_ID)
        if self.eos_token_ids is not None:
            checked["eos_token_ids"] = _ids(self.eos_token_ids)
        if not isinstance(self.calibration, Calibration):
            raise UsageError(f"calibration is {values.shown(self.calibration)}; it must be a Calibration(...).")
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _ids(given: Any) -> tuple[int, ...]:
    given = values.plain(given)
    if not (values.is_list(given) or isinstance(given, Set)):
        raise UsageError(f"eos_token_ids is {values.shown(given)}; it must be a list of token ids, or None.")
    found = values.ids("eos_token_ids", [*given], "a list of token ids")
    return tuple(values.integer("an id of eos_token_ids", one, 0, _MAX_ID) for one in found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleModel(ModelShape):
    """A module as part of a program; `module_reading.read_module` determines all of it.

    `graphdef` is the module without its arrays, `dtype` that of its keys and values. Its arrays have `num_weights`
    numbers in `weight_bytes` bytes; each token is multiplied with `num_multiplied` of them. `widest` is the most
    numbers per token that one multiplication returns, logits excluded.
    """

    graphdef: Any
    dtype: DTypeLike
    num_weights: int
    weight_bytes: int
    num_multiplied: int
    widest: int


@pytree
class ModuleWeights:
    """The arrays of a module: its `nnx.State`."""

    state: Any


def is_module(given: object) -> bool:
    """Return whether this is a `flax.nnx.Module`; if it is, flax has been imported already."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(given, nnx.Module)


def with_attention(module: Any, replaced: Callable[[AttentionFn], AttentionFn]) -> Any:
    """Return `module` after replacing each `attention_fn` in it by `replaced` of it.

    Changes the module in place: pass a merged copy.
    """
    for part in [*attending(module)]:
        part.attention_fn = replaced(part.attention_fn)
    return module


def attending(module: Any) -> Iterator[Any]:
    """Yield the parts of a module that have an attention function."""
    from flax import nnx

    for _, part in nnx.iter_modules(module):
        if callable(getattr(part, "attention_fn", None)):
            yield part


def forward(
    weights: ModuleWeights,
    model: ModuleModel,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attend: Attend,
    memory: Memory,
) -> tuple[Float[Array, "b t v"], Memory]:
    """Return float32 logits at every position and the memory after all layers, numbered by the calls of attention.

    Masks and other arguments of the module's attention are ignored: `attend` determines what a token attends to. Raises
    ValueError for a bias on the scores.
    """
    from flax import nnx

    layer, threaded = 0, memory

    def attention(query: Array, key: Array, value: Array) -> Array:
        nonlocal layer, threaded
        q, k, v = (x.astype(model.dtype) for x in (query, key, value))
        with jax.named_scope("attend"):
            out, threaded = attend(layer, q, k, v, threaded, model.softmax(layer))
        layer += 1
        return out.astype(query.dtype)

    def logits(state: Any, tokens: Array, positions: Array) -> Array:
        module = with_attention(nnx.merge(model.graphdef, state), lambda _: called)
        return module(tokens, positions).astype(jnp.float32)

    return calls.run(logits, attention, weights.state, tokens, positions), threaded


def called(query: Array, key: Array, value: Array, bias: Array | None = None, *_: Any, **__: Any) -> Array:
    """Replaces a call of attention in a module's program. Raises ValueError for a bias on the scores."""
    if bias is not None:
        raise ValueError("bias: got one on the scores of attention, wanted none")
    return calls.marked(query, key, value)
