"""How weights are stored where they are no floats: by the `quantization_config` of a model's config.json.

An `Encoding` says which tensors of a file stand in the place of a weight, and what numbers they stand for. There are
three kinds: small numbers with a `Scaled` grid beside them, several numbers of 4 or 8 bits in a word, `Packed`, and
floats of 4 bits in groups with a power of two, `Mxfp4`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from et_jax.errors import UsageError
from et_jax.io.json_files import checked, named
from et_jax.io.schema import QuantizationFile, SchemeFile

Shape = tuple[int, ...]
FLOATS = ("F32", "BF16", "F16")
WEIGHT = "weight"

_ORIGINAL = "use the bfloat16 or float32 original"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of eight that each field of a word holds, lowest bits first
_E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32
)  # by the lower three bits; the fourth is the sign
_GROUP = 32  # numbers that share a power of two in MXFP4


class Part(NamedTuple):
    """A tensor that an encoded weight has: its dtype in the words of safetensors, and its shape, or either of two."""

    stored: tuple[str, ...]
    shapes: tuple[Shape, ...]


class _OfMatrix:
    """An encoding of matrices, each a tensor whose name ends in `WEIGHT`."""

    def encodes(self, name: str, shape: Shape) -> bool:
        """Return whether a weight that is called `name` as floats may be stored so."""
        return len(shape) == 2 and name.endswith(WEIGHT)

    def beside(self, name: str, last: str) -> str:
        """Return what a tensor that stands for such a weight is called, its own last word given."""
        return name.removesuffix(WEIGHT) + last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(_OfMatrix):
    """Whole numbers or floats of 8 bits, each multiplied by the scale of its block of `block` rows and columns.

    A block of None rows or columns is as high or as wide as the matrix. `stored` is their dtype in the words of
    safetensors, and the scales are the tensor `scale`.
    """

    stored: Literal["I8", "F8_E4M3"]
    block: tuple[int | None, int | None]
    scale: str = "weight_scale"

    @property
    def by_output(self) -> bool:
        """Whether the numbers are whole and have a scale for each output."""
        return self.stored == "I8" and self.block == (1, None)

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        """Return the tensors of a weight of this shape, [out, in], by the last words of their names.

        The first tells that a weight is encoded.
        """
        grid = tuple(-(-size // (block or size)) for size, block in zip(shape, self.block, strict=True))
        shapes = (grid, *[grid[:1]] * (grid[1] == 1), *[()] * (grid == (1, 1)))
        return {WEIGHT: Part((self.stored,), (shape,)), self.scale: Part(FLOATS, shapes)}

    def decode(self, parts: Mapping[str, np.ndarray], shape: Shape) -> Float[np.ndarray, "o i"]:
        """Return the numbers that the tensors of a weight stand for, float32."""
        [grid, *_] = self.parts(shape)[self.scale].shapes
        scale = parts[self.scale].astype(np.float32).reshape(grid)
        for axis, (size, block) in enumerate(zip(shape, self.block, strict=True)):
            if block not in (1, None):
                scale = np.repeat(scale, block, axis=axis).take(range(size), axis=axis)
        return parts[WEIGHT].astype(np.float32) * scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(_OfMatrix):
    """Whole numbers of `bits` bits, 32 // bits of them in a word, less a zero point and times a scale for each group.

    A group is `group` inputs of an output, None all of them. By `layout`, "gptq" packs along the inputs and tells the
    group of each; its zero points are one too low, in "gptq_v2" they are not. "awq" packs along the outputs, in an
    order of its own. "words", of compressed-tensors, packs along the inputs with the middle of the range for zero.
    """

    layout: Literal["gptq", "gptq_v2", "awq", "words"]
    bits: int
    group: int | None

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        """Return the tensors of a weight of this shape, [out, in], by the last words of their names.

        The first tells that a weight is encoded. Raises UsageError where none of this shape can be.
        """
        (o, i), fields = shape, 32 // self.bits
        groups = -(-i // (self.group or i))
        along_outputs = () if self.layout == "words" else (o,)
        along_inputs = () if self.layout == "awq" else (i,)
        for size in along_outputs + along_inputs:
            if size % fields:
                raise UsageError(
                    f"A weight of {o} outputs and {i} inputs cannot be packed by {fields} as {self.layout} does; mend "
                    "config.json."
                )
        if self.layout == "words":
            by_group = ((o, groups), *[(o,)] * (groups == 1))
            return {"weight_packed": Part(("I32",), ((o, i // fields),)), "weight_scale": Part(FLOATS, by_group)}
        packed = (i, o // fields) if self.layout == "awq" else (i // fields, o)
        found = {
            "qweight": Part(("I32",), (packed,)),
            "qzeros": Part(("I32",), ((groups, o // fields),)),
            "scales": Part(FLOATS, ((groups, o),)),
        }
        return found if self.layout == "awq" else found | {"g_idx": Part(("I32",), ((i,),))}

    def decode(self, parts: Mapping[str, np.ndarray], shape: Shape) -> Float[np.ndarray, "o i"]:
        """Return the numbers that the tensors of a weight stand for, float32.

        Raises UsageError for a group that is not there.
        """
        (o, i), middle = shape, 1 << (self.bits - 1)
        groups = np.arange(i) // (self.group or i)
        if self.layout == "words":
            whole = self._unpacked(parts["weight_packed"]).astype(np.float32) - middle
            return whole * parts["weight_scale"].astype(np.float32).reshape(o, -1)[:, groups]
        zeros, scales = self._unpacked(parts["qzeros"]), parts["scales"].astype(np.float32)
        if self.layout == "awq":
            place = np.argsort(_AWQ_ORDER) + np.arange(0, o, len(_AWQ_ORDER))[:, None]
            whole, zeros = (one[:, place.ravel()] for one in (self._unpacked(parts["qweight"]), zeros))
        else:
            whole, groups = self._unpacked(parts["qweight"].T).T, parts["g_idx"]
            if groups.min() < 0 or groups.max() >= len(scales):
                raise UsageError(
                    f"A g_idx names the group {groups.max() if groups.min() >= 0 else groups.min()} and there are "
                    f"{len(scales)}; fetch the files again."
                )
            if self.layout == "gptq":
                zeros = (zeros + 1) & (2 * middle - 1)
        return ((whole.astype(np.float32) - zeros[groups].astype(np.float32)) * scales[groups]).T

    def _unpacked(self, words: Int[np.ndarray, "a b"]) -> Int[np.ndarray, "a c"]:
        """Return the fields of words, those of the lowest bits first, along the last axis."""
        shifts = np.arange(0, 32, self.bits, dtype=np.uint32)
        fields = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << self.bits) - 1)
        return fields.reshape(len(words), -1).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """Floats of 4 bits (e2m1), each 32 along the inputs multiplied by a power of two (e8m0): OCP Microscaling, 2023.

    So are the matrices of a layer's experts stored, which are one tensor [expert, in, out] as floats: `blocks` hold two
    numbers in a byte, the first in its lower half, [expert, out, group, byte], and `scales` the exponents more by 127,
    [expert, out, group]; 255 stands for NaN.
    """

    def encodes(self, name: str, shape: Shape) -> bool:
        """Return whether a weight may be stored so: the experts of a layer are, and nothing else."""
        return len(shape) == 3

    def beside(self, name: str, last: str) -> str:
        """Return what a tensor that stands for such a weight is called, its own last word given."""
        return f"{name}_{last}"

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        """Return the tensors of a weight of this shape, [expert, in, out], by the last words of their names.

        The first tells that a weight is encoded. Raises UsageError where none of this shape can be.
        """
        e, i, o = shape
        if i % _GROUP:
            raise UsageError(
                f"Experts of {i} inputs cannot be stored in groups of {_GROUP} as mxfp4; mend config.json."
            )
        groups = (e, o, i // _GROUP)
        return {"blocks": Part(("U8",), ((*groups, _GROUP // 2),)), "scales": Part(("U8",), (groups,))}

    def decode(self, parts: Mapping[str, np.ndarray]) -> Float[np.ndarray, "e i o"]:
        """Return the numbers that the tensors of some experts and outputs stand for, float32; they are exact."""
        blocks, scales = parts["blocks"], parts["scales"]
        signed = np.concatenate([_E2M1, -_E2M1])
        halves = np.arange(256)
        pairs = np.stack([signed[halves & 15], signed[halves >> 4]], axis=-1)
        powers = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
        found = pairs[blocks].reshape(*scales.shape, _GROUP) * powers[scales][..., None]
        return found.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


Encoding = Scaled | Packed | Mxfp4
"""How the matrices of a checkpoint are stored. Those that are stored as floats all the same are read as floats."""


def encoding_of(values: Any, source: str) -> Encoding | None:
    """Return how weights are stored by a `quantization_config`, None where there is none.

    Raises UsageError for one that cannot be read; `source` is the file named in the message.
    """
    if not values:
        return None
    if not isinstance(values, dict):
        raise UsageError(f"{source}: quantization_config is no object; {_ORIGINAL}.")
    file = checked(values, QuantizationFile, f"{source}: quantization_config")
    readers = {
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "fbgemm_fp8": lambda file, source: Scaled(stored="F8_E4M3", block=(1, None)),
        "gptq": _gptq,
        "awq": _awq,
        "mxfp4": lambda file, source: Mxfp4(),
    }
    if file.quant_method not in readers:
        raise UsageError(
            f"{source}: weights quantised by {named(file.quant_method or 'no known method')} are not supported, only "
            f"by {', '.join(readers)}; {_ORIGINAL}."
        )
    return readers[file.quant_method](file, source)


def _refused(source: str, what: str) -> UsageError:
    return UsageError(f"{source}: quantised weights {what} are not supported; {_ORIGINAL}.")


def _compressed(file: QuantizationFile, source: str) -> Encoding:
    if (file.sparsity_config or {}).get("format", "dense") != "dense":
        raise _refused(source, "that are sparse too")
    schemes = [group.weights for group in (file.config_groups or {}).values() if group.weights is not None]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise _refused(source, "of several kinds" if schemes else "without a scheme")
    scheme = schemes[0]
    if not scheme.symmetric:
        raise _refused(source, "with zero points of compressed-tensors")
    blocks = {
        "channel": (1, None),
        "tensor": (None, None),
        "group": (1, scheme.group_size) if (scheme.group_size or 0) > 0 else (),
        "block": tuple(scheme.block_structure or ()),
    }
    block = blocks.get(scheme.strategy or "tensor", ())
    kind = (scheme.type, scheme.num_bits)
    if len(block) == 2:
        whole, small = ("int-quantized", "naive-quantized"), ("float-quantized", "naive-quantized")
        if kind == ("int", 8) and file.format in whole:
            return Scaled(stored="I8", block=block)
        if kind == ("float", 8) and file.format in small:
            return Scaled(stored="F8_E4M3", block=block)
        if kind in (("int", 4), ("int", 8)) and file.format == "pack-quantized" and block[0] == 1:
            return Packed(layout="words", bits=scheme.num_bits, group=block[1])
    raise _refused(source, _told(file, scheme))


def _told(file: QuantizationFile, scheme: SchemeFile) -> str:
    return (
        f"of the format {named(str(file.format))}, {scheme.num_bits} bits of {named(scheme.type)} by "
        f"{named(str(scheme.strategy))},"
    )


def _fp8(file: QuantizationFile, source: str) -> Scaled:
    if file.weight_block_size is None:
        return Scaled(stored="F8_E4M3", block=(None, None))
    if len(file.weight_block_size) != 2:
        raise _refused(source, f"in blocks of {file.weight_block_size}")
    rows, columns = file.weight_block_size
    return Scaled(stored="F8_E4M3", block=(rows, columns), scale="weight_scale_inv")


def _gptq(file: QuantizationFile, source: str) -> Packed:
    layout = file.checkpoint_format or "gptq"
    if layout not in ("gptq", "gptq_v2") or file.bits not in (4, 8):
        raise _refused(source, f"of the format {named(layout)} and {file.bits} bits")
    return Packed(layout=layout, bits=file.bits, group=_group(file, source))


def _awq(file: QuantizationFile, source: str) -> Packed:
    version, bits = (file.version or "gemm").lower(), file.bits or file.w_bit
    if version != "gemm" or bits != 4 or file.zero_point is False:
        raise _refused(source, f"of the version {named(version)} and {bits} bits")
    return Packed(layout="awq", bits=bits, group=_group(file, source))


def _group(file: QuantizationFile, source: str) -> int | None:
    """Return the inputs of a group; -1 in the file stands for all of them."""
    size = file.group_size or file.q_group_size
    if size is None or (size < 1 and size != -1):
        raise _refused(source, f"in groups of {size}")
    return None if size == -1 else size
