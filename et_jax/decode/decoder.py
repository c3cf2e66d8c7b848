"""The functions of decoding, bound to one configuration and jitted.

    prefill -> insert -> step, step, step -> release

Every function takes a state and returns a state. `decoder` binds the static configuration and jits
them with the state donated, so that the cache is updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.decode import slots
from et_jax.decode.cache.compress import compress
from et_jax.decode.config import DecoderConfig, Variant
from et_jax.decode.output import StepOutput, packed_step, unpacked_steps
from et_jax.decode.packed import Packed
from et_jax.decode.plant import Weights
from et_jax.decode.prefill import prefill
from et_jax.decode.request import Request
from et_jax.decode.score import TokenScores, score
from et_jax.decode.sharded import returning_split
from et_jax.decode.state import DecodeState, empty
from et_jax.decode.step import step
from et_jax.scope import within
from et_jax.types import replace


def decode(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    num_steps: Int[Array, ""],
    until_end: Bool[Array, ""] | bool = False,
    *,
    variant: Variant | None = None,
) -> tuple[DecodeState, Packed]:
    """Run up to `num_steps` steps (at most `max_steps`) on the device, stopping early when no slot is runnable.

    With `until_end` it runs no step after one that ended a sequence, until the slot is released, because another
    sequence may be waiting for the slot. A smaller `variant` has only the named abilities; without drafts it stops when
    the model self-drafts and a draft is wanted. Returns the outputs of all steps in one array, which
    `unpacked_steps` restores.
    """
    variant = variant or config.full_variant
    rows = None if variant.rows == config.batch else variant.rows

    @jax.jit  # traced once, for the shapes and for the loop
    def one(weights: Weights, state: DecodeState) -> tuple[DecodeState, StepOutput, Packed]:
        chosen = {"drafts": variant.drafts, "chooses": variant.chooses, "num_rows": rows}
        state, output = step(config, weights, state, **chosen)
        return state, output, packed_step(output)

    shape = jax.eval_shape(one, weights, state)[2]
    words = jnp.zeros((config.max_steps, *shape.words.shape), shape.words.dtype)
    num_steps = jnp.minimum(num_steps, config.max_steps)

    def going(carry: tuple) -> Bool[Array, ""]:
        i, state, _, stop = carry
        return (i < num_steps) & jnp.any(state.runnable) & ~stop

    def advance(carry: tuple) -> tuple:
        i, state, words, _ = carry
        state, output, ran = one(weights, state)
        stop = until_end & jnp.any(output.finished | (output.fault > 0))
        if not variant.drafts and config.pruned is not None:
            stop |= jnp.any(state.runnable & state.draft.wanted)
        return i + 1, state, words.at[i].set(ran.words), stop

    start = jnp.int32(0), state, words, until_end & jnp.any(state.ended)
    _, state, words, _ = jax.lax.while_loop(going, advance, start)
    return state, replace(shape, words=words)


def in_float32(function: Callable) -> Callable:
    """Return a function with products of float32 in full precision: a GPU's default is TF32 with ten bits."""

    @functools.wraps(function.func if isinstance(function, partial) else function)
    def traced(*arguments: Any, **named: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **named)

    return traced


@within
def snapshot(state: DecodeState) -> DecodeState:
    """Return a copy that outlives a donating step."""
    return jax.tree.map(jnp.copy, state)


class Program:
    """A jitted function, called and lowered under the package's own settings of JAX."""

    def __init__(self, jitted: Any) -> None:
        self.jitted, self.lower, self._call = jitted, within(jitted.lower), within(jitted)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The functions of this module, of `compress` and of `slots`, bound to a configuration and jitted.

    The state argument is donated to a function that returns a new state. `variants` are the programs of `decode`, the
    full one included.
    """

    config: DecoderConfig
    empty: Callable[[], DecodeState]
    prefill: Callable[[Weights, DecodeState, Any, Any, Any, Any], tuple[DecodeState, Bool[Array, ""]]]
    score: Callable[[Weights, DecodeState, Any, Any, Any, Any, Any], tuple[DecodeState, TokenScores]]
    insert: Callable[[DecodeState, Any, Request], DecodeState]
    step: Callable[[Weights, DecodeState], tuple[DecodeState, StepOutput]]
    variants: Mapping[Variant, Callable[..., tuple[DecodeState, Packed]]]
    compress: Callable[[DecodeState, Any], tuple[DecodeState, Bool[Array, ""]]]
    release: Callable[[DecodeState, Any], DecodeState]
    fork: Callable[[DecodeState, Any, Any], tuple[DecodeState, Bool[Array, ""]]]
    share: Callable[[DecodeState, Any, Any, Any], DecodeState]
    increment: Callable[[DecodeState, Any, Any], DecodeState]
    decrement: Callable[[DecodeState, Any, Any], DecodeState]
    read_row: Callable[[DecodeState, Any], slots.SlotRow]
    read_pages: Callable[[DecodeState, Any, Any], slots.Pages]
    write_row: Callable[[DecodeState, Any, slots.SlotRow], tuple[DecodeState, Bool[Array, ""]]]
    write_pages: Callable[[DecodeState, Any, Any, slots.Pages], DecodeState]

    def decode(
        self, weights: Weights, state: DecodeState, num_steps: Any, until_end: Any = False
    ) -> tuple[DecodeState, StepOutput, Int[Array, ""]]:
        """Run up to `num_steps` steps by the program with all abilities.

        Returns the outputs stacked over `max_steps`, and the number of steps that were run.
        """
        state, burst = self.variants[self.config.full_variant](weights, state, num_steps, until_end)
        return state, *_unpacked_steps(burst)


_unpacked_steps = within(jax.jit(unpacked_steps))


def decoder(config: DecoderConfig) -> Decoder:
    """Return the decoder of a configuration."""
    platform = jax.default_backend()
    options = config.compiler_options(platform)

    def compiled(function: Callable, *bound: Any, donate: int | tuple[int, ...] = ()) -> Callable:
        precise = in_float32(function) if platform == "gpu" else function
        own = partial(precise, *bound)  # a function of its own, because `jax.jit` caches by function
        if config.mesh is not None:
            own = returning_split(config.mesh, own)
        return Program(jax.jit(own, donate_argnums=donate, compiler_options=options))

    return Decoder(
        config=config,
        empty=compiled(empty, config),
        prefill=compiled(prefill, config, donate=1),
        score=compiled(score, config, donate=1),
        insert=compiled(slots.insert, config, donate=0),
        step=compiled(step, config, donate=1),
        variants={one: compiled(partial(decode, variant=one), config, donate=1) for one in config.variants},
        compress=compiled(compress, config, donate=0),
        release=compiled(slots.release, donate=0),
        fork=compiled(slots.fork, config, donate=0),
        share=compiled(slots.share, donate=0),
        increment=compiled(slots.increment, donate=0),
        decrement=compiled(slots.decrement, donate=0),
        read_row=compiled(slots.read_row),
        read_pages=compiled(slots.read_pages, config),
        write_row=compiled(slots.write_row, config, donate=0),
        write_pages=compiled(slots.write_pages, config, donate=0),
    )
