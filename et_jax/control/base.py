"""What a law may see, what it may decide, and how laws are put together.

A law is one small pure function of one sequence. It sees plain arrays and never a neighbour, so the
same seed gives the same text whoever shares the batch:

    def my_law(signals: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=0.5 + 0.1 * signals.entropy)

A law with numbers is a value, so that every sequence of a batch may bring its own in one program:

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
    """What a step observed of a sequence, and what a law may know of it. Laws only read it.

    Entropies are in nats, varentropies in nats^2. `entropy`, `varentropy`, `margin` and `surprisal` are
    raw: of the model's own distribution, before penalties and temperature; the first two at the
    calibrated temperature where the model has one. `margin` is how far the likeliest logit stands above
    the next, in nats. `tempered_*` is after temperature, before truncation; `truncated_entropy` after
    both. `entropy_low` and `entropy_high` bracket the raw entropy and are equal when it is exact.
    `kept_mass` is the share of attention mass on the blocks read, the least over layers and query heads:
    certain under a certified selector, else an estimate that may be too high. `attention_entropy` is that of
    a query head over its blocks, from 0 to 1 (see `view.attention_entropy`): the mean over layers and heads,
    and the least; NaN where no layer chose blocks by this token. `blocks_read` counts
    blocks over layers and KV heads, `summaries_read` those looked at to choose. `cost` is in bytes, and
    nominal: this sequence's own cache reads and experts, and the share of the other weights that it would have were
    every row of the step served; what a text is charged (`TokenTrace.cost`) depends on the company. `length` counts
    tokens in the cache, `generated` those produced, `remaining` those still allowed; `arrival` orders
    requests; `urgency` is the caller's.
    """

    entropy: Float[Array, "*b"]
    varentropy: Float[Array, "*b"]
    entropy_low: Float[Array, "*b"]
    entropy_high: Float[Array, "*b"]
    margin: Float[Array, "*b"]
    tempered_entropy: Float[Array, "*b"]
    tempered_varentropy: Float[Array, "*b"]
    truncated_entropy: Float[Array, "*b"]
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
        """Return a table of the fields, a column for each of the first sequences; None amid tracing, for repr."""
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
    "urgency": "the caller's",
}
"""Units of the fields of `Signals`, in their order."""
_MOST_SEQUENCES = 8  # that are shown of a batch


@pytree
class ControlState:
    """What the laws have decided for a sequence.

    `entropy` is filtered, in nats; `entropic_time` in nats; `total_cost` in bytes, nominal; `surprisal_cap`
    in nats (inf = off); `tolerance` is the attention mass that may be left unread; `wait` counts steps
    since the last token. `block_mask` packs, 32 to a word, the blocks each layer and KV head read last
    (see `unpack_blocks`). `block_mass` is the share of attention mass that each query head had on each block when that
    was last read, 1 before; None unless a selector goes by it. `records` is what laws keep for themselves from token to
    token, each under one name. `prompt` is how the prompt is read, up to the first token; None without a budget.

    A temperature must be finite and at least 0, the entropic time finite, the other numbers not NaN: a law
    that breaks this ends its sequence with an error that names the field.
    """

    entropy: Float[Array, "*b"]
    entropic_time: Float[Array, "*b"]
    total_cost: Float[Array, "*b"]
    temperature: Float[Array, "*b"]
    surprisal_cap: Float[Array, "*b"]
    tolerance: Float[Array, "*b"]
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
    """Return the 32-bit words that hold one bit per block."""
    return -(-num_blocks // 32)


class Law:
    """A rule run after every token: calling it sets the next step, `init` the starting values of a sequence.

    Both change only the fields they are named for. Derive from it, as a `value`, for a law with numbers; a
    plain function `(Signals, ControlState) -> ControlState` is a law with none and nothing to start.

    `sets` names the fields that a call may change, records aside. A law that does not say is asked by tracing it, and one
    that changes the call of another has to say anew.
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
"""Entropy (nats) and varentropy (nats^2) of this very step's distribution at a given temperature."""

TemperatureRule = Callable[[MomentsAt, Signals, ControlState], Float[Array, ""]]
"""The temperature for this very token, decided before it is sampled; may probe other temperatures."""

PriorityRule = Callable[[Signals, ControlState], Float[Array, ""]]
"""How soon a sequence should be served, higher first; `priority.Aged` keeps a rule from starving any."""


@value
class Function(Law):
    """A plain function as a value: it has no numbers, and equals itself alone."""

    function: Callable = static()

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function does."""
        return self.function(*arguments)


def as_value(given: Any) -> Any:
    """Return a value as it is, and a plain function as a value. Raises ValueError for anything else."""
    if not callable(given):
        raise ValueError(f"got {described(given)} where a function or a value that is called was wanted")
    return Function(given) if jax.tree_util.all_leaves([given]) else given


def name_of(given: Any) -> str:
    """Return what to call a law, a rule or a selector in a sentence."""
    if isinstance(given, Function):
        given = given.function
    return getattr(given, "__qualname__", type(given).__name__)


@value
class Chain(Law):
    """Laws run in order, each seeing what those before it decided."""

    laws: tuple[Law, ...]

    @property
    def sets(self) -> frozenset[str] | None:
        """What any of the laws sets; None where one of them does not say."""
        each = [law.sets for law in self.laws]
        return None if None in each else frozenset().union(*each)

    def init(self, state: ControlState) -> ControlState:
        """Return the state as every law starts it."""
        for law in self.laws:
            state = started(law, state)
        return state

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Return the state after every law."""
        for law in self.laws:
            state = updated(law, signals, state)
        return state


def chain(*laws: AnyLaw) -> Chain:
    """Return the law that runs `laws` in order, each seeing what those before it decided; chains among them open up."""
    members = (law.laws if isinstance(law, Chain) else (as_value(law),) for law in laws)
    return Chain(tuple(law for each in members for law in each))


def started(law: Law, state: ControlState) -> ControlState:
    """Return the state as `law` starts it. Raises ValueError, naming the law, where it is not of the right form."""
    return _checked(law, state, law.init(state))


def updated(law: Law, signals: Signals, state: ControlState) -> ControlState:
    """Return the state after `law`. Raises ValueError, naming the law, where it is not of the right form."""
    after = _checked(law, state, law(signals, state))
    if described(after.records) != described(state.records):
        raise ValueError(
            f"The law {name_of(law)} leaves records of {described(after.records)} where {described(state.records)} stood; "
            "what a law keeps has one form, that of its init."
        )
    return after


def _checked(law: Law, before: ControlState, after: Any) -> ControlState:
    """The state with Python numbers as arrays, and every field of the shape and dtype it had."""
    if not isinstance(after, ControlState):
        raise ValueError(
            f"The law {name_of(law)} returns {type(after).__name__}; it must return the ControlState it is given, "
            "with fields changed by replace."
        )
    changed = {}
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name != "records" and new is not old:
            changed[field.name] = one_like(old, new, f"The law {name_of(law)} sets {field.name} to")
    return replace(after, **changed) if changed else after


def one_like(wanted: Array, given: Any, said: str) -> Array:
    """Return `given`, a Python number where numbers of its kind are `wanted` as an array of them.

    Raises ValueError where shape or dtype are not those of `wanted`.
    """
    kind = jnp.floating if isinstance(given, float) else jnp.number
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if is_number and jnp.issubdtype(wanted.dtype, kind):
        return jnp.full_like(wanted, given)
    if described(given) != described(wanted):
        raise ValueError(f"{said} {described(given)}; it must be {described(wanted)}.")
    return jnp.asarray(given)


def described(tree: Any) -> str:
    """Return dtypes and shapes, for a sentence."""
    if tree is None:
        return "None"
    if isinstance(tree, dict | list | tuple) or not jax.tree_util.all_leaves([tree]):
        named = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree))
        return "{" + ", ".join(f"{name} {described(leaf)}" for name, leaf in named) + "}"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"{tree.dtype}{list(tree.shape)}"
    return type(tree).__name__


def claim(law: Law, state: ControlState, name: str, record: Any) -> ControlState:
    """Return the state with a record of its own for `law`, as `init` starts it.

    Raises ValueError where another law keeps one of that name: the two would overwrite each other.
    """
    if name in state.records:
        raise ValueError(
            f"The law {name_of(law)} keeps the record {name!r}, which another law of the chain keeps already; "
            "leave one of them out."
        )
    return replace(state, records=state.records | {name: record})


def with_record(state: ControlState, name: str, record: Any) -> ControlState:
    """Return the state with the record `name` changed."""
    return replace(state, records=state.records | {name: record})
