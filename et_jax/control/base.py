"""What a law may read, what it may set, and how laws are combined.

A law is one small pure function of one sequence. It reads plain arrays and never another sequence, so a
sequence produces the same tokens for the same seed whatever it is batched with:

    def my_law(signals: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=0.5 + 0.1 * signals.entropy)

A law with numbers is a value, so that each sequence of a batch can have its own numbers in one program:

    @value
    class Warm(Law):
        slope: Number = 0.1

        def __call__(self, signals: Signals, state: ControlState) -> ControlState:
            return replace(state, temperature=0.5 + self.slope * signals.entropy)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.budget import PromptRecord
from et_jax.io import html
from et_jax.types import pytree, replace, static, value


@pytree
class Signals:
    """What a step measured of one sequence. Laws only read it.

    Entropies are in nats, varentropies in nats^2. `entropy`, `varentropy`, `margin` and `surprisal` are raw: of the
    model's own distribution, before penalties and temperature; the first two at the calibrated temperature where the
    model has one. `margin` is the difference of the two greatest logits, in nats. `tempered_*` is after temperature,
    before truncation; `truncated_entropy` after both. `constrained_entropy` is the entropy of the tokens that a grammar
    or `allowed_token_ids` permits, before penalties; the difference to `entropy` is what they decide. Without them it
    equals `entropy`. `entropy_low` and `entropy_high` bracket the raw entropy and are equal when it is exact.
    `kept_mass` is the share of attention mass on the blocks read, the minimum over layers and query heads: a lower
    bound under a certified selector, else an estimate that may be too high; 1 if everything is read, NaN at a token
    that reads the last selection again. `attention_entropy` is that of a query head over its blocks, from 0 to 1 (see
    `view.attention_entropy`): the mean over layers and heads, and the minimum; NaN if no layer selected blocks for this
    token. `blocks_read` counts blocks over layers and KV heads, `summaries_read` those scored for the selection. `cost`
    is in bytes, and nominal: the cache reads and experts of this sequence, and its share of the other weights if every
    row of the step is in use; the cost charged to a request (`TokenTrace.cost`) depends on the batch. `length` counts
    tokens in the cache, `generated` those produced, `remaining` those still allowed; `arrival` orders requests;
    `urgency` is set by the caller.
    """

    entropy: Float[Array, "*b"]
    varentropy: Float[Array, "*b"]
    entropy_low: Float[Array, "*b"]
    entropy_high: Float[Array, "*b"]
    margin: Float[Array, "*b"]
    tempered_entropy: Float[Array, "*b"]
    tempered_varentropy: Float[Array, "*b"]
    truncated_entropy: Float[Array, "*b"]
    constrained_entropy: Float[Array, "*b"]
    surprisal: Float[Array, "*b"]
    kept_mass: Float[Array, "*b"]
    attention_entropy: Float[Array, "*b"]
    least_attention_entropy: Float[Array, "*b"]
    blocks_read: Int[Array, "*b"]
    summaries_read: Int[Array, "*b"]
    cost: Float[Array, "*b"]
    length: Int[Array, "*b"]
    generated: Int[Array, "*b"]
    remaining: Int[Array, "*b"]
    arrival: Int[Array, "*b"]
    allocated_pages: Int[Array, "*b"]
    urgency: Float[Array, "*b"]

    def _repr_html_(self) -> str | None:
        """Return a table with a row per field and a column for each of the first sequences; None while tracing."""
        if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self)):
            return None
        columns = {name: np.ravel(getattr(self, name)).tolist() for name in _UNITS}
        count = min(map(len, columns.values()))
        shown = min(count, _MOST_SEQUENCES)
        header = ["signal", *(["value"] if np.ndim(self.entropy) == 0 else map(str, range(shown))), "unit"]
        rows = [[name, *columns[name][:shown], unit] for name, unit in _UNITS.items()]
        said = f"The first {shown} of {count} sequences." if shown < count else ""
        return html.boxed(html.table(header, rows, said))


_UNITS = {
    "entropy": "nats",
    "varentropy": "nats²",
    "entropy_low": "nats",
    "entropy_high": "nats",
    "margin": "nats",
    "tempered_entropy": "nats",
    "tempered_varentropy": "nats²",
    "truncated_entropy": "nats",
    "constrained_entropy": "nats",
    "surprisal": "nats",
    "kept_mass": "share",
    "attention_entropy": "0 to 1",
    "least_attention_entropy": "0 to 1",
    "blocks_read": "blocks",
    "summaries_read": "blocks",
    "cost": "bytes",
    "length": "tokens",
    "generated": "tokens",
    "remaining": "tokens",
    "arrival": "order",
    "allocated_pages": "pages",
    "urgency": "set by the caller",
}
"""Units of the fields of `Signals`, in their order."""
_MOST_SEQUENCES = 8  # shown of a batch


@pytree
class ControlState:
    """What the laws have set for a sequence.

    `entropy` is filtered, in nats; `entropic_time` in nats; `total_cost` in bytes, nominal; `surprisal_cap`
    in nats (inf = off); `tolerance` is the attention mass that may be left unread. With
    `refresh` the next token selects its blocks anew, else it reads those of `block_mask` again. `wait` counts steps
    since the last token. `block_mask` packs, 32 to a word, the blocks each layer and KV head read last
    (see `unpack_blocks`). `block_mass` is the share of attention mass that each query head had on each block when that
    was last read, 1 before; None unless a selector uses it. `records` maps names to the state that laws carry from
    token to token. `prompt` is the state of a prefill budget, up to the first token; None without a budget.

    A temperature must be finite and at least 0, the entropic time finite, the other numbers not NaN: a law
    that violates this ends its sequence with an error that names the field.
    """

    entropy: Float[Array, "*b"]
    entropic_time: Float[Array, "*b"]
    total_cost: Float[Array, "*b"]
    temperature: Float[Array, "*b"]
    surprisal_cap: Float[Array, "*b"]
    tolerance: Float[Array, "*b"]
    refresh: Bool[Array, "*b"]
    priority: Float[Array, "*b"]
    wait: Int[Array, "*b"]
    block_mask: UInt32[Array, "*b l k n32"]
    records: dict[str, Any]
    prompt: PromptRecord | None = None
    block_mass: Float[Array, "*b l h n"] | None = None


def unpack_blocks(block_mask: UInt32[Array, "*b n32"]) -> Bool[Array, "*b n"]:
    """Return the mask of blocks that `pack_blocks` packed; its length is a multiple of 32."""
    bits = (block_mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*block_mask.shape[:-1], -1).astype(bool)


def pack_blocks(mask: Bool[Array, "*b n"]) -> UInt32[Array, "*b n32"]:
    """Return `mask` packed 32 blocks to a word, block 0 in the lowest bit; the last word is zero-padded."""
    if past_end := -mask.shape[-1] % 32:
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, past_end)])
    words = mask.reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def num_words(num_blocks: int) -> int:
    """Return how many 32-bit words are needed for one bit per block."""
    return -(-num_blocks // 32)


class Law:
    """A rule run after every token: a call sets the next step, `init` the starting values of a sequence.

    Both change only the fields they are named for. A law with numbers derives from this class, as a `value`; a
    plain function `(Signals, ControlState) -> ControlState` is a law without numbers or starting values.

    `sets` names the fields that a call may change, records aside. If it is None, the fields are found by tracing. A
    subclass that overrides `__call__` must declare `sets` again.
    """

    sets: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__call__" in vars(cls) and "sets" not in vars(cls):
            cls.sets = None

    def init(self, state: ControlState) -> ControlState:
        """Return the state of a sequence before its first token."""
        return state

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Return the state after one token."""
        raise NotImplementedError


AnyLaw = Law | Callable[[Signals, ControlState], ControlState]

MomentsAt = Callable[[Float[Array, ""] | float], tuple[Float[Array, ""], Float[Array, ""]]]
"""Entropy (nats) and varentropy (nats^2) of the current step's distribution at a given temperature."""

TemperatureRule = Callable[[MomentsAt, Signals, ControlState], Float[Array, ""]]
"""The temperature of the current token, set before it is sampled; may probe other temperatures."""

PriorityRule = Callable[[Signals, ControlState], Float[Array, ""]]
"""The scheduling priority of a sequence, higher first; `priority.Aged` prevents starvation."""


@value
class Function(Law):
    """A plain function as a value: it has no numbers, and equals only itself."""

    function: Callable = static()

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result."""
        return self.function(*arguments)


def as_value(given: Any) -> Any:
    """Return a value unchanged, and a plain function wrapped as a value. Raises ValueError for anything else."""
    if not callable(given):
        raise ValueError(f"got {described(given)}, wanted a function or a callable value")
    return Function(given) if jax.tree_util.all_leaves([given]) else given


def name_of(given: Any) -> str:
    """Return the name of a law, a rule or a selector for messages."""
    if isinstance(given, Function):
        given = given.function
    return getattr(given, "__qualname__", type(given).__name__)


@value
class Chain(Law):
    """Laws run in order; each reads what the earlier ones set."""

    laws: tuple[Law, ...]

    @property
    def sets(self) -> frozenset[str] | None:
        """The union of what the laws set; None if one of them does not declare it."""
        each = [law.sets for law in self.laws]
        return None if None in each else frozenset().union(*each)

    def init(self, state: ControlState) -> ControlState:
        """Return the state after the `init` of every law."""
        for law in self.laws:
            state = started(law, state)
        return state

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Return the state after every law."""
        for law in self.laws:
            state = updated(law, signals, state)
        return state


def chain(*laws: AnyLaw) -> Chain:
    """Return the law that runs `laws` in order; each reads what the earlier ones set. Nested chains are flattened."""
    members = (law.laws if isinstance(law, Chain) else (as_value(law),) for law in laws)
    return Chain(tuple(law for each in members for law in each))


def started(law: Law, state: ControlState) -> ControlState:
    """Return the state after the law's `init`. Raises ValueError, naming the law, if shapes or dtypes change."""
    return _checked(law, state, law.init(state))


def updated(law: Law, signals: Signals, state: ControlState) -> ControlState:
    """Return the state after a call of `law`. Raises ValueError, naming the law, if shapes or dtypes change."""
    after = _checked(law, state, law(signals, state))
    if described(after.records) != described(state.records):
        raise ValueError(
            f"The law {name_of(law)} leaves records of {described(after.records)}, wanted {described(state.records)}; "
            "the records of a law must have the form that its init returns."
        )
    return after


def _checked(law: Law, before: ControlState, after: Any) -> ControlState:
    """Return the state with Python numbers as arrays; every changed field must have its old shape and dtype."""
    if not isinstance(after, ControlState):
        raise ValueError(
            f"The law {name_of(law)} returns {type(after).__name__}; it must return the ControlState it received, "
            "with fields changed by replace."
        )
    changed = {}
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name != "records" and new is not old:
            changed[field.name] = one_like(old, new, f"The law {name_of(law)} sets {field.name} to")
    return replace(after, **changed) if changed else after


def one_like(wanted: Array, given: Any, said: str) -> Array:
    """Return `given`; a Python number becomes an array if `wanted` has numbers of its kind.

    Raises ValueError if shape or dtype differ from those of `wanted`.
    """
    kind = jnp.floating if isinstance(given, float) else jnp.number
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if is_number and jnp.issubdtype(wanted.dtype, kind):
        return jnp.full_like(wanted, given)
    if described(given) != described(wanted):
        raise ValueError(f"{said} {described(given)}; it must be {described(wanted)}.")
    return jnp.asarray(given)


def described(tree: Any) -> str:
    """Return dtypes and shapes as text for messages."""
    if tree is None:
        return "None"
    if isinstance(tree, dict | list | tuple) or not jax.tree_util.all_leaves([tree]):
        named = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree))
        return "{" + ", ".join(f"{name} {described(leaf)}" for name, leaf in named) + "}"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"{tree.dtype}{list(tree.shape)}"
    return type(tree).__name__


def claim(law: Law, state: ControlState, name: str, record: Any) -> ControlState:
    """Return the state with a new record for `law`, called by its `init`.

    Raises ValueError if another law has already claimed that name, because they would overwrite each other.
    """
    if name in state.records:
        raise ValueError(
            f"The law {name_of(law)} claims the record {name!r}, which another law of the chain already claims; "
            "remove one of them."
        )
    return replace(state, records=state.records | {name: record})


def with_record(state: ControlState, name: str, record: Any) -> ControlState:
    """Return the state with the record `name` replaced."""
    return replace(state, records=state.records | {name: record})
