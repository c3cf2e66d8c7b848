"""GGUF, the file format of llama.cpp: its values and the places of its tensors, validated.

Files may be malicious. The reader reads no byte beyond the end of the file, and counts the items of all lists before
it allocates them. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from et_jax.errors import UsageError
from et_jax.io.json_files import check_regular, named

MAGIC, SUFFIX = b"GGUF", ".gguf"
_VERSIONS = (2, 3)
_AGAIN = "fetch the file again"
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_MOST_AXES = 4
_ROWS_JOINED = 16
_MOST_ITEMS = 2**23  # of all lists of a file, as Python objects of some 60 bytes; vocabularies have up to 2**18
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes of unquantised tensors."""
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """The place of a tensor: `kind` is its ggml type, `shape` has the fastest axis last, `begin` is a byte offset."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int

    def numbers(self, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Return a copy of the tensor, or of the half-open range `rows` of its first axis.

        A quantised tensor is dequantised to float32, others keep their dtype. Raises UsageError if the file has shrunk.
        """
        first, end = rows or (0, self.shape[0])
        shape = (end - first, *self.shape[1:])
        begin, length = (_bytes(self.kind, count * math.prod(shape[1:])) for count in (first, end - first))
        with self.file.open("rb") as reader:
            stored = np.fromfile(reader, np.uint8, length, offset=self.begin + begin)
        if len(stored) < length:
            raise UsageError(f"{self.file} ends within the tensor {self.name}; {_AGAIN}.")
        if self.kind in FLOATS:
            return stored.view(FLOATS[self.kind]).reshape(shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        # the library takes 16 rows at a time, which is slow for short ones: rows are joined, as blocks do not span them
        count = math.prod(shape[:-1])
        joined = stored.reshape(count // math.gcd(count, _ROWS_JOINED), -1)
        return dequantize(joined, GGMLQuantizationType[self.kind]).reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
    """The contents of a file's header, and of those of the files that it is split into."""

    file: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


@functools.cache
def block_of(kind: str) -> tuple[int, int]:
    """Return the numbers per block of a type, and its bytes. Raises UsageError for types without a decoder."""
    if kind in FLOATS:
        return 1, FLOATS[kind].itemsize
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantised = GGMLQuantizationType[kind]
    count, size = GGML_QUANT_SIZES[quantised]
    try:
        dequantize(np.zeros((1, size), np.uint8), quantised)
    except NotImplementedError as error:
        raise UsageError(
            f"Tensors of the type {kind} are not supported; use a file of another type, such as Q8_0."
        ) from error
    return count, size


def _bytes(kind: str, count: int) -> int:
    """Return the bytes of so many numbers, which fill entire blocks."""
    block, size = block_of(kind)
    return count // block * size


def is_gguf(path: str | Path) -> bool:
    """Return whether a path has the suffix of GGUF files."""
    return Path(path).suffix.lower() == SUFFIX


def gguf_in(folder: Path) -> Path | None:
    """Return the only GGUF file of a folder without config.json, the first of a split one; None if there is none.

    Raises UsageError if there are several.
    """
    if (folder / "config.json").exists():
        return None
    try:
        files = sorted(one for one in folder.iterdir() if is_gguf(one) and one.is_file())
    except OSError:  # an unreadable folder: reading config.json will report it
        return None
    models = [file for file in files if (split := _SPLIT.search(file.name)) is None or int(split[1]) == 1]
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:4])
        raise UsageError(f"{folder} holds {len(models)} GGUF files ({names}); name the one to load.")
    return models[0] if models else None


def read_gguf(file: Path) -> Gguf:
    """Return the header of a model file. A split file is read with its other parts in the same folder.

    Raises UsageError if a file is absent, damaged, of another version, or has invalid values.
    """
    size = check_regular(file)
    return _read(file, size, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(file: Path, size: int, changed: int) -> Gguf:  # a replaced file has another size or time
    first = _Reader(file).header()
    parts = _parts(file, first.values.get("split.count", 1))
    if parts == [file]:
        return first
    tensors: dict[str, GgufTensor] = {}
    values: dict[str, Any] = {}
    for part in parts:
        found = _Reader(part).header()
        if twice := tensors.keys() & found.tensors.keys():
            raise UsageError(f"{part} holds {named(min(twice))}, which another part has too; {_AGAIN}.")
        tensors |= found.tensors
        values = {**found.values, **values}
    return Gguf(file=file, values=values, tensors=tensors)


def parts_of(file: Path) -> list[Path]:
    """Return the files that a GGUF file is split into, in order; only the file itself if it is not split.

    Raises UsageError if one is absent.
    """
    return _parts(file, read_gguf(file).values.get("split.count", 1))


def _parts(file: Path, count: Any) -> list[Path]:
    """Return the files of a model whose header gives `count` parts."""
    if not isinstance(count, int) or count < 2:
        return [file]
    split = _SPLIT.search(file.name)
    if split is None or int(split[2]) != count:
        raise UsageError(f"{file} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf.")
    names = (_SPLIT.sub(f"-{number:05}-of-{count:05}.gguf", file.name) for number in range(1, count + 1))
    parts = [file.with_name(name) for name in names]
    for part in parts:
        if not part.exists():
            raise UsageError(f"{file} is one of {count} parts, and {part.name} is not beside it; fetch that file too.")
    return parts


class _Reader:
    """A file that is read from its first byte on."""

    def __init__(self, file: Path) -> None:
        self._file, self._size, self._at, self._items = file, check_regular(file), 0, 0
        if self._size < 24:
            raise self._damaged("it is too short")
        with file.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def header(self) -> Gguf:
        if self._take(4) != MAGIC:
            raise UsageError(f"{self._file} is no GGUF file; name one that is, or a folder that holds a model.")
        version = self._number("I")
        if version not in _VERSIONS:
            raise UsageError(
                f"{self._file} is of GGUF version {version}, or of another byte order; versions 2 and 3 are supported."
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if key in values:
                raise self._damaged(f"the key {named(key)} is listed twice")
            values[key] = self._value(self._number("I"))
        places = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged("general.alignment is no power of two")
        return Gguf(file=self._file, values=values, tensors=self._placed(places, -(-self._at // alignment) * alignment))

    def _placed(self, places: list[GgufTensor], data: int) -> dict[str, GgufTensor]:
        """Return tensors by name, each within the file and not overlapping the others."""
        found: dict[str, GgufTensor] = {}
        end = data
        for place in sorted(places, key=lambda place: place.begin):
            block, _ = block_of(place.kind)
            begin, count = data + place.begin, math.prod(place.shape)
            if place.name in found:
                raise self._damaged(f"the tensor {named(place.name)} is listed twice")
            if place.shape[-1] % block:
                raise self._damaged(f"the rows of {named(place.name)} do not fill blocks of {block}")
            if begin < end:
                raise self._damaged(f"the tensor {named(place.name)} begins within another")
            end = begin + _bytes(place.kind, count)
            if end > self._size:
                raise self._damaged(f"the tensor {named(place.name)} ends beyond the file")
            found[place.name] = dataclasses.replace(place, begin=begin)
        return found

    def _tensor(self) -> GgufTensor:
        name = self._text()
        axes = self._number("I")
        if not 1 <= axes <= _MOST_AXES:
            raise self._damaged(f"the tensor {named(name)} has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        if not 0 < math.prod(shape) <= 8 * self._size:
            raise self._damaged(f"the tensor {named(name)} has more numbers than the file has room for")
        kind, begin = self._number("I"), self._number("Q")
        return GgufTensor(file=self._file, name=name, kind=self._kind(kind, name), shape=shape, begin=begin)

    def _kind(self, number: int, name: str) -> str:
        plain = {0: "F32", 1: "F16", 30: "BF16"}
        if number in plain:
            return plain[number]
        from gguf import GGMLQuantizationType

        try:
            return GGMLQuantizationType(number).name
        except ValueError as error:
            raise UsageError(
                f"{self._file}: the tensor {named(name)} is of the unknown type {number}; use a file of another type, "
                "such as Q8_0."
            ) from error

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        kind, count = self._number("I"), self._number("Q")
        self._items += count
        if self._items > _MOST_ITEMS:
            raise self._damaged(f"its lists have more than {_MOST_ITEMS} items")
        return [self._text() for _ in range(count)] if kind == _TEXT else self._numbers(kind, count).tolist()

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise self._damaged(f"a value is of the unknown type {kind}")
        dtype = np.dtype("<" + _NUMBERS[kind])
        numbers = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return numbers != 0 if kind == _BOOL else numbers

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self._damaged("a text is not UTF-8") from error

    def _number(self, form: str) -> int:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > self._size:
            raise self._damaged("it ends within its header")
        return self._bytes[begin : self._at]

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"{self._file} is truncated or damaged ({why}); {_AGAIN}.")
