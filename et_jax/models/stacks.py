"""Layer stacking: equal layers of a model share one array of the cache and are run by a scan.

Layers of one kind differ only in their numbers, so a program may contain the kind once and loop over the layers: the
cost of tracing, lowering and compiling hardly grows with their number. A repeating pattern of kinds, such as a window,
a window and none, is looped over by its period.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from et_jax.models.config import ModelShape
from et_jax.types import pytree, replace, static

T = TypeVar("T")
Carried = TypeVar("Carried")


def stacked_on(platform: str) -> bool:
    """Return whether the weights of equal layers are stacked on a platform, as JAX names it.

    A TPU's compiler reads a layer's weights in place in the stack, and so does a GPU's with `compiler_options`. XLA
    on a CPU copies them first, so that products take 1.3 to 1.6 times as long: there each layer has its own arrays,
    and a conditional selects them (`OfTurn`).
    """
    return platform != "cpu"


def compiler_options(platform: str) -> dict[str, bool | int] | None:
    """Return XLA's compiler options for programs of stacked layers on a platform; None for the defaults.

    On a GPU, products of cuBLAS read a slice of a stack in place. Triton's, and products that XLA joins
    because they share an input, read a copy.
    """
    in_place = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return in_place if platform in ("gpu", "cuda") else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """`depth` repetitions (turns) of a pattern of `period` layers, from layer `first` on.

    Each layer of the pattern has a place, the first of them `place`: in a model's cache, and in its weights if they are
    stacked, the arrays of all turns at a place are one. A stack of one turn has unstacked layers.
    """

    first: int
    period: int
    depth: int
    place: int

    @property
    def num_layers(self) -> int:
        """The number of layers in all turns."""
        return self.period * self.depth

    def layer(self, turns: range, offset: int, turn: int | Int[Array, ""]) -> "Layer":
        """Return the layer at an offset of the pattern in a turn, which is one of `turns` that are alike."""
        begin = self.first + offset
        return Layer(
            among=range(begin + turns.start * self.period, begin + turns.stop * self.period, self.period),
            number=begin + turn * self.period,
            place=self.place + offset,
            turn=None if self.depth == 1 else turn,
            index=None if len(turns) == 1 else turn - turns.start,
        )

    def runs(self, alike: Sequence[Hashable] | None) -> list[range]:
        """Return the turns in order, grouped into runs of successive ones that are `alike` layer by layer.

        `alike` has a value for every layer of the model; None puts each turn in a run of its own.
        """
        if alike is None:
            return [range(turn, turn + 1) for turn in range(self.depth)]
        begins = [self.first + turn * self.period for turn in range(self.depth)]
        groups = groupby(range(self.depth), lambda turn: tuple(alike[begins[turn] : begins[turn] + self.period]))
        return [range(turns[0], turns[-1] + 1) for turns in (list(group) for _, group in groups)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer as a program runs it: at a `turn` of its `place`, None if no other layer has the same place.

    In a scan over several layers, `number` and `turn` are arrays, and it is the layer at `index` of those of `among`.
    """

    among: range
    number: int | Int[Array, ""]
    place: int
    turn: int | Int[Array, ""] | None
    index: Int[Array, ""] | None

    @property
    def like(self) -> int:
        """The number of the first layer that the program runs here."""
        return self.among[0]

    def own(self, layers: Sequence[T]) -> "OfTurn[T]":
        """Return this layer's own value, of those of all layers of the model."""
        return OfTurn(each=tuple(layers[number] for number in self.among), index=self.index)

    def of(self, tree: T, axis: int) -> T:
        """Return the entry of this layer in arrays with an entry for every layer along an axis."""
        return jax.tree.map(partial(entry, number=self.number, axis=axis), tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTurn(Generic[T]):
    """A value of one layer: of `each` that a scan runs through, the one at `index`, which a conditional selects."""

    each: tuple[T, ...]
    index: Int[Array, ""] | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function` of the value and of more arguments, without a copy of the value."""
        if self.index is None:
            return function(self.each[0], *args)
        return jax.lax.switch(self.index, [partial(function, one) for one in self.each], *args)

    def part(self, read: Callable[[T], Any]) -> "OfTurn[Any]":
        """Return a part of the value."""
        return OfTurn(each=tuple(map(read, self.each)), index=self.index)


def entry(x: Array | np.ndarray, number: int | Int[Array, ""], axis: int = 0) -> Array | np.ndarray:
    """Return one entry of an array along an axis."""
    if isinstance(number, int):
        return x[(slice(None),) * axis + (number,)]
    return jax.lax.dynamic_index_in_dim(jnp.asarray(x), number, axis, keepdims=False)


def stacks_of(model: ModelShape) -> tuple[Stack, ...]:
    """Return the stacks of a model's layers."""
    kinds = model.kinds
    found: list[Stack] = []
    first = place = 0
    while first < len(kinds):
        period, depth = _repeated(kinds[first:])
        found.append(Stack(first=first, period=period, depth=depth, place=place))
        first, place = first + period * depth, place + period
    return tuple(found)


def _repeated(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Return the period that the kinds begin with, and its repetitions: the shortest period that covers most."""
    best = 1, 1
    for period in range(1, len(kinds) // 2 + 1):
        depth = 1
        while kinds[depth * period : (depth + 1) * period] == kinds[:period]:
            depth += 1
        if depth > 1 and period * depth > best[0] * best[1]:
            best = period, depth
    return best


def layers_by_place(model: ModelShape) -> tuple[range, ...]:
    """Return the numbers of the layers at each place."""
    ends = ((stack, stack.first + stack.num_layers) for stack in stacks_of(model))
    return tuple(range(stack.first + n, end, stack.period) for stack, end in ends for n in range(stack.period))


def located(stacks: Sequence[Stack], number: int) -> Layer:
    """Return the layer of this number, outside a scan."""
    stack = next(stack for stack in stacks if number < stack.first + stack.num_layers)
    turn, offset = divmod(number - stack.first, stack.period)
    return stack.layer(range(turn, turn + 1), offset, turn)


@pytree
class Threaded:
    """A memory of two parts: what is `carried` from layer to layer, and the `outputs` of each layer, in order."""

    carried: Any
    outputs: tuple[Any, ...] = ()


@pytree
class Turns:
    """The outputs of the layers of one scan of `depth` turns: for each layer of the pattern, arrays "depth ..."."""

    of_period: tuple[Any, ...]
    depth: int = static()


def through(
    stacks: Sequence[Stack],
    alike: Sequence[Hashable] | None,
    run: Callable[[Layer, Carried], tuple[Carried, Any]],
    carried: Carried,
) -> tuple[Carried, tuple[Any, ...]]:
    """Run every layer in order, those of a stack that are `alike` in a scan, grouped by `Stack.runs`.

    `run` takes the carried value and returns its successor and the layer's output. Returns the last carried value and
    all outputs, those of one scan as `Turns`.
    """
    outputs: list[Any] = []
    for stack in stacks:
        for turns in stack.runs(alike):
            one = partial(_turn, stack, turns, run)
            if len(turns) == 1:
                (_, carried), of_period = one((turns[0], carried))
                outputs += of_period
            else:
                begun = jnp.int32(turns.start), carried
                (_, carried), of_period = jax.lax.scan(one, begun, length=len(turns))
                outputs.append(Turns(of_period=of_period, depth=len(turns)))
    return carried, tuple(outputs)


def _turn(
    stack: Stack,
    turns: range,
    run: Callable[[Layer, Carried], tuple[Carried, Any]],
    begun: tuple[int | Int[Array, ""], Carried],
    _: None = None,
) -> tuple[tuple[int | Int[Array, ""], Carried], tuple[Any, ...]]:
    """Run the layers of one turn, and count it: a counter in the loop shows XLA which slice of a stack a turn reads."""
    turn, carried = begun
    outputs = []
    for offset in range(stack.period):
        carried, output = run(stack.layer(turns, offset, turn), carried)
        outputs.append(output)
    return (turn + 1, carried), tuple(outputs)


def parts(outputs: Sequence[Any], part: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return a part of each layer's output, in the form of the outputs."""
    return tuple(
        replace(one, of_period=tuple(map(part, one.of_period))) if isinstance(one, Turns) else part(one)
        for one in outputs
    )


def by_layer(outputs: Sequence[Any], read: Callable[[Any], T], axis: int) -> T:
    """Return the arrays that `read` takes from each layer's output, with an entry per layer in order along an axis."""

    def of_turns(*of_period: Array) -> Array:
        both = jnp.stack(of_period, axis=1)
        return jnp.moveaxis(both.reshape(-1, *both.shape[2:]), 0, axis)

    found = [
        jax.tree.map(of_turns, *map(read, one.of_period))
        if isinstance(one, Turns)
        else jax.tree.map(partial(jnp.expand_dims, axis=axis), read(one))
        for one in outputs
    ]
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=axis), *found)


def folded(outputs: Sequence[Any], add: Callable[[T, Any], T], sofar: T) -> T:
    """Return `sofar` after `add` of each layer's output, one layer after the other."""

    def turn(sofar: T, of_period: tuple[Any, ...]) -> tuple[T, None]:
        for one in of_period:
            sofar = add(sofar, one)
        return sofar, None

    for one in outputs:
        sofar = jax.lax.scan(turn, sofar, one.of_period)[0] if isinstance(one, Turns) else add(sofar, one)
    return sofar
