"""The mapping from a model's weights to the tensors of its files: a leaf is a tensor, a part, or several joined.

Reading, writing and checking of files use only this mapping, `Sources`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A full tensor of a file, or the `rows` [begin, end) of its first axis.

    `shape` is that of the full tensor. `lane` (i, n) selects the indices i, i + n, i + 2n, ... of the last axis. A
    `swapped` piece has the file's last two axes transposed.
    """

    tensor: str
    shape: Shape
    rows: tuple[int, int] | None = None
    lane: tuple[int, int] | None = None
    swapped: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """The rows, also for a full tensor."""
        return self.rows or (0, self.shape[0])

    @property
    def is_full(self) -> bool:
        """Whether it is the full tensor, unchanged."""
        return self.rows is None and self.lane is None and not self.swapped

    @property
    def shape_read(self) -> Shape:
        """The shape of the piece."""
        (begin, end), (first, lanes) = self.span, self.lane or (0, 1)
        shape = (end - begin, *self.shape[1:])
        shape = (*shape[:-1], len(range(first, shape[-1], lanes)))
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape

    def of(self, tensor: Any) -> Any:
        """Return the piece of a tensor, given as an array; a view if it is a NumPy array."""
        found = tensor if self.rows is None else tensor[slice(*self.rows)]
        if self.lane is not None:
            first, lanes = self.lane
            found = found[..., first::lanes]
        return found.swapaxes(-1, -2) if self.swapped else found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The pieces of a leaf, concatenated along the first axis, or `stacked` along a new axis."""

    pieces: tuple[Piece, ...]
    stacked: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the leaf."""
        shapes = [piece.shape_read for piece in self.pieces]
        return (len(shapes), *shapes[0]) if self.stacked else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def is_full(self) -> bool:
        """Whether the leaf is a single full tensor."""
        return len(self.pieces) == 1 and not self.stacked and self.pieces[0].is_full

    def parts(self, leaf: Any) -> list[Any]:
        """Return the part of a leaf for each piece, in order; views if it is a NumPy array."""
        if len(self.pieces) == 1 and not self.stacked:
            return [leaf]
        if self.stacked:
            return [leaf[number] for number in range(len(self.pieces))]
        counts = [piece.shape_read[0] for piece in self.pieces]
        return [leaf[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]

    def read(self, read: Callable[[Piece], np.ndarray], dtype: Any) -> np.ndarray:
        """Return the leaf in `dtype`, reading its pieces one at a time."""
        if len(self.pieces) == 1 and not self.stacked:
            return read(self.pieces[0]).astype(dtype, copy=False)
        leaf = np.empty(self.shape, dtype)
        for part, piece in zip(self.parts(leaf), self.pieces, strict=True):
            part[...] = read(piece)
        return leaf


Sources = Mapping[str, Source]
"""The source of every leaf of a model by its name, such as `embedding` or `layers.0.q`."""


def one_to_one(tensors: Mapping[str, str]) -> Callable[[Mapping[str, Shape]], Sources]:
    """Return a function that computes the sources of leaves with a tensor each.

    `tensors` has their names, with `*` for the layer number. A second `*` numbers the tensors that a leaf stacks.
    """

    def sources(shapes: Mapping[str, Shape]) -> Sources:
        found = {}
        for leaf, shape in shapes.items():
            kind, number = re.sub(r"\.\d+\.", ".*.", leaf), "".join(re.findall(r"\.(\d+)\.", leaf))
            name = tensors[kind].replace("*", number, 1)
            if stacked := "*" in name:
                pieces = tuple(Piece(tensor=name.replace("*", str(i)), shape=shape[1:]) for i in range(shape[0]))
            else:
                pieces = (Piece(tensor=name, shape=shape),)
            found[leaf] = Source(pieces=pieces, stacked=stacked)
        return found

    return sources


def fused(tensors: Mapping[str, tuple[str, ...]]) -> Callable[[Mapping[str, Shape]], Sources]:
    """Return a function that computes the sources of layer leaves that a tensor concatenates along its rows.

    `tensors` has the names of such leaves in order, by the tensor's name with `*` for the layer number.
    """

    def sources(shapes: Mapping[str, Shape]) -> Sources:
        found = {}
        for layer in sorted({int(number) for leaf in shapes for number in re.findall(r"^layers\.(\d+)\.", leaf)}):
            for tensor, names in tensors.items():
                leaves = [f"layers.{layer}.{name}" for name in names]
                ends = [*accumulate((shapes[leaf][0] for leaf in leaves), initial=0)]
                whole = (ends[-1], *shapes[leaves[0]][1:])
                for leaf, rows in zip(leaves, pairwise(ends), strict=True):
                    piece = Piece(tensor=tensor.replace("*", str(layer)), shape=whole, rows=rows)
                    found[leaf] = Source(pieces=(piece,))
        return found

    return sources


def tensor_shapes(sources: Sources) -> dict[str, Shape]:
    """Return the shape of every tensor that is read from."""
    return {piece.tensor: piece.shape for source in sources.values() for piece in source.pieces}


def tensors_of(sources: Sources, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors to write for leaves given by name."""
    found = {}
    for name, source in sources.items():
        for piece, part in zip(source.pieces, source.parts(leaves[name]), strict=True):
            if piece.is_full:
                found[piece.tensor] = part
            else:
                if piece.tensor not in found:
                    found[piece.tensor] = np.empty(piece.shape, part.dtype)
                piece.of(found[piece.tensor])[...] = part
    return found


def check_sources(sources: Sources, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError unless the leaves have these shapes, and each row and lane of every tensor is read once."""
    for leaf, shape in shapes.items():
        if leaf not in sources or sources[leaf].shape != shape:
            got = sources[leaf].shape if leaf in sources else "no source"
            raise ValueError(f"sources: got {got} of {leaf}, wanted shape {shape}")
    spans: dict[tuple[str, Shape], dict[tuple[int, int], list[tuple[int, int]]]] = {}
    for source in sources.values():
        for piece in source.pieces:
            by_lane = spans.setdefault((piece.tensor, piece.shape), {})
            by_lane.setdefault(piece.lane or (0, 1), []).append(piece.span)
    for (tensor, shape), by_lane in spans.items():
        lanes = max(number for _, number in by_lane)
        if by_lane.keys() != {(lane, lanes) for lane in range(lanes)}:
            raise ValueError(f"sources: got the lanes {sorted(by_lane)} of {tensor}, wanted each of {lanes} once")
        for read in by_lane.values():
            ends = [0, *(row for span in sorted(read) for row in span), shape[0]]
            if any(end != begin for end, begin in zip(ends[::2], ends[1::2], strict=True)):
                raise ValueError(f"sources: got rows {sorted(read)} of {tensor}, wanted each of its {shape[0]} once")
