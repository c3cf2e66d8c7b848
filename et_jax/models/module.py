"""A model written as a `flax.nnx.Module`: called as it is, with the decoder's attention in the place of its own."""

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
    """What cannot be seen from a module.

    It reads `max_positions` tokens at most. `bos_token_id` and `eos_token_ids` stand in for those of the tokenizer;
    None leaves them to it. `calibration` is what was measured of the module, its sensitivity by
    `models.sensitivity.head_sensitivity`; None says that nothing was. Raises UsageError for a field that is nothing of
    the kind.
    """

    max_positions: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    def __post_init__(self) -> None:
        values.fill_unset(self)
        checked = {"max_positions": values.whole("max_positions", self.max_positions, 2, _MAX_POSITIONS)}
        if self.bos_token_id is not None:
            checked["bos_token_id"] = values.whole("bos_token_id", self.bos_token_id, 0, _MAX_ID)
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
    return tuple(values.whole("an id of eos_token_ids", one, 0, _MAX_ID) for one in found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleModel(ModelShape):
    """A module as part of a program; all of it is found by `module_reading.read_module`.

    `graphdef` is the module without its arrays, `dtype` that of its keys and values. Its arrays hold `num_weights`
    numbers in `weight_bytes` bytes; each token is multiplied with `num_multiplied` of them. `widest` is the most
    numbers of a token that one multiplication gives, logits aside.
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
    """Return whether this is a `flax.nnx.Module`; where it is, flax has been imported already."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(given, nnx.Module)


def with_attention(module: Any, replaced: Callable[[AttentionFn], AttentionFn]) -> Any:
    """Return `module` after each `attention_fn` in it was exchanged for what `replaced` makes of it.

    The module itself is changed: give one that was merged for the purpose.
    """
    for part in [*attending(module)]:
        part.attention_fn = replaced(part.attention_fn)
    return module


def attending(module: Any) -> Iterator[Any]:
    """Yield the parts of a module that hold an attention function."""
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
    """Return float32 logits at every position and the memory after all layers: the calls of attention, in turn.

    Masks, and whatever else the module hands its attention, are not read: `attend` knows what a token sees. Raises
    ValueError for a bias on the scores.
    """
    from flax import nnx

    layer, held = 0, memory

    def attention(query: Array, key: Array, value: Array) -> Array:
        nonlocal layer, held
        q, k, v = (x.astype(model.dtype) for x in (query, key, value))
        with jax.named_scope("attend"):
            out, held = attend(layer, q, k, v, held, model.softmax(layer))
        layer += 1
        return out.astype(query.dtype)

    def logits(state: Any, tokens: Array, positions: Array) -> Array:
        module = with_attention(nnx.merge(model.graphdef, state), lambda _: called)
        return module(tokens, positions).astype(jnp.float32)

    return calls.run(logits, attention, weights.state, tokens, positions), held


def called(query: Array, key: Array, value: Array, bias: Array | None = None, *_: Any, **__: Any) -> Array:
    """Stand for a call of attention in a module's program. Raises ValueError for a bias on the scores."""
    if bias is not None:
        raise ValueError("bias: got one on the scores of attention, wanted none")
    return calls.marked(query, key, value)
