"""Tensors in safetensors files: reads their headers, matches them with a model's weights, and reads their bytes.

The name, shape and dtype of every tensor are checked before the first is read. A tensor that the configuration does not
expect is an error, since dropping it (a bias, a norm, a layer) would change the output. Only tensors in `INERT` are
ignored, and beside quantised weights those in `ACTIVATIONS` and zero biases, which some tools write. The prefix of a
name may differ from the family's, as in a model that was saved without its head, or as part of a larger model.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from et_jax.errors import UsageError
from et_jax.io.gguf import GgufTensor
from et_jax.io.json_files import MAX_INDEX_BYTES, check_regular, checked, is_there, named, read_json
from et_jax.io.schema import IndexFile
from et_jax.models import gguf
from et_jax.models.config import ModelConfig
from et_jax.models.encodings import FLOATS, Encoding, Mxfp4, Part
from et_jax.models.families.registry import family_of
from et_jax.models.sources import Piece, Sources, tensor_shapes

INERT = re.compile(r"rotary_emb\.inv_freq$")
ACTIVATIONS = re.compile(r"\.(input_scale|activation_scale|[kqv]_scale|weight_shape)$")
STORED = {"BF16": jnp.bfloat16, "F16": jnp.float32, "F32": jnp.float32}
_ROWS_COMPARED = 1024  # rows of two matrices that are compared at once
FLOAT8 = {"F8_E4M3": jnp.float8_e4m3fn}


class Stored(NamedTuple):
    """A tensor in a file: `stored` is the safetensors name of its dtype."""

    file: Path
    name: str
    stored: str
    shape: tuple[int, ...]


class Encoded(NamedTuple):
    """A weight that is stored as several tensors, `parts` by the suffixes of their names."""

    encoding: Encoding
    parts: Mapping[str, Stored]
    shape: tuple[int, ...]


Tensors = Mapping[str, Stored | Encoded | GgufTensor]
"""The stored weights of a model, by the names of their unquantised tensors."""


def stored_as(tensor: Stored | Encoded | GgufTensor) -> str:
    """Return the safetensors name of a tensor's dtype; for an encoded tensor, that of its decoded numbers.

    For a quantised tensor of a GGUF file it is `gguf.QUANTISED`.
    """
    if isinstance(tensor, GgufTensor):
        return gguf.stored_as(tensor)
    return tensor.stored if isinstance(tensor, Stored) else "F32"


def embedding_of(sources: Sources) -> str:
    """Return the name of the embedding's first tensor, whose dtype is the model's."""
    return sources["embedding"].pieces[0].tensor


def headers(folder: Path) -> dict[str, Stored]:
    """Return the headers of all tensors in a folder's files."""
    return headers_of(_shard_files(folder))


def headers_of(files: Iterable[Path]) -> dict[str, Stored]:
    """Return the headers of all tensors in safetensors files."""
    tensors = {}
    for file in files:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if name in tensors:
                    raise UsageError(
                        f"{name} stands in {tensors[name].file.name} and in {file}; use files of one model."
                    )
                piece = reader.get_slice(name)
                tensors[name] = Stored(file, name, piece.get_dtype(), tuple(piece.get_shape()))
    return tensors


def _shard_files(folder: Path) -> Iterable[Path]:
    """Return the safetensors files of a folder: those that the index names, or the single file."""
    index = folder / "model.safetensors.index.json"
    if is_there(index):
        names = checked(read_json(index, MAX_INDEX_BYTES), IndexFile, index).weight_map.values()
        files = [folder / _shard_name(name, index) for name in sorted(set(names))]
        for file in files:
            if not file.exists():
                raise UsageError(f"{index.name} names {file.name}, which is not in {folder}; fetch that file too.")
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if any(folder.glob("pytorch_model*.bin")):
        raise UsageError(f"{folder} holds only pytorch_model.bin; convert it to safetensors, which cannot run code.")
    raise UsageError(f"{folder} holds no model.safetensors; fetch the weights too.")


def _shard_name(name: str, index: Path) -> str:
    """Return `name` if it is that of a file in the model's own folder. Links in the folder are allowed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or PureWindowsPath(name).drive:
        raise UsageError(f"{index}: weight_map names {named(name)}, which leaves the folder; fetch the file again.")
    if not path.parts or not name.isprintable():
        raise UsageError(f"{index}: weight_map names {named(name)}, which is no file name; fetch the file again.")
    return name


def check(config: ModelConfig, sources: Sources, tensors: Mapping[str, Stored], encoding: Encoding | None) -> Tensors:
    """Return every stored weight of the model by the family's name, after checking all of them.

    Only the embedding of a model with a tied head may be stored under another name, the head's.
    """
    family, tensors = family_of(config), _under_own_names(config, sources, tensors)
    embedding, head = embedding_of(sources), family.head
    found: dict[str, Stored | Encoded] = {}
    for name, shape in tensor_shapes(sources).items():
        kept = head if name == embedding and config.tie_embeddings and name not in tensors else name
        parts = _parts(kept, shape, tensors, encoding)
        if name == head and parts is None and name not in tensors:
            raise UsageError(
                f"The weights have no output head ({head}) and config.json does not tie it to the embedding, so they "
                f"predict no token; take the files of {family.class_name}, or set tie_word_embeddings to true if the "
                "model was trained so."
            )
        if parts is None or encoding is None:
            found[name] = _checked(kept, Part(tuple(STORED), (shape,)), tensors)
        else:
            checked = {last: _checked(encoding.beside(kept, last), part, tensors) for last, part in parts.items()}
            found[name] = Encoded(encoding, checked, shape)
    used = {(one.file, one.name) for weight in found.values() for one in _stored(weight)}
    for name, one in sorted(tensors.items()):
        if (one.file, one.name) in used or (config.tie_embeddings and name == head):
            continue
        passed = INERT.search(name) or (family.apart and family.apart.match(name))
        passed = passed or (encoding and (ACTIVATIONS.search(name) or _is_zero_bias(one)))
        if not passed:
            raise UsageError(f"{one.file}: tensor {one.name} has no place in this {config.architecture} model.")
    return found


def has_own_head(config: ModelConfig, sources: Sources, tensors: Mapping[str, Stored]) -> bool:
    """Return whether files have an output head that differs from the embedding; reading stops at a difference."""
    tensors = _under_own_names(config, sources, tensors)
    embedding, head = (tensors.get(name) for name in (embedding_of(sources), family_of(config).head))
    if embedding is None or head is None or not {embedding.stored, head.stored} <= {*FLOATS}:
        return False
    if embedding.shape != head.shape or not head.shape:
        return embedding.shape != head.shape
    with _open(embedding.file) as of_embedding, _open(head.file) as of_head:
        one, other = of_embedding.get_slice(embedding.name), of_head.get_slice(head.name)
        for begin in range(0, head.shape[0], _ROWS_COMPARED):
            rows = slice(begin, min(begin + _ROWS_COMPARED, head.shape[0]))
            if not np.array_equal(_comparable(one[rows], other[rows]), _comparable(other[rows], one[rows])):
                return True
    return False


def _comparable(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the bits of an array if the other has the same dtype, otherwise its numbers in float32."""
    return array.view(f"u{array.itemsize}") if array.dtype == other.dtype else array.astype(np.float32)


def _under_own_names(config: ModelConfig, sources: Sources, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of files by the names that the family uses.

    Names of a model that was saved without its head lack the prefix (`layers.0...`), and those of a part of a larger
    model have another (`model.language_model.layers.0...`). The embedding's name determines the prefix.
    """
    embedding, head = embedding_of(sources), family_of(config).head
    own, own_head = embedding.removesuffix("embed_tokens.weight"), head.removesuffix("lm_head.weight")
    inner = {name.removeprefix(own).split(".")[0] for name in tensor_shapes(sources) if name.startswith(own)}
    renamed = [
        *((stem + part, own + part) for stem in _stems(tensors, "embed_tokens", own) for part in inner),
        *((stem + "lm_head", own_head + "lm_head") for stem in _stems(tensors, "lm_head", own_head)),
    ]
    found: dict[str, Stored] = {}
    for name, one in tensors.items():
        words = next((words for words in renamed if name.startswith(f"{words[0]}.")), ("", ""))
        name = words[1] + name.removeprefix(words[0])
        if name in found:
            raise UsageError(f"{one.file}: {one.name} and {found[name].name} are one tensor; use files of one model.")
        found[name] = one
    return found


def _stems(tensors: Mapping[str, Stored], part: str, own: str) -> list[str]:
    """Return the prefix of a model part in names; none if it is the family's `own`, or ambiguous."""
    stems = {found[1] for name in tensors if (found := re.match(rf"(|.*\.){part}\.", name))}
    return [] if own in stems or len(stems) > 1 else [*stems]


def _parts(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Stored], encoding: Encoding | None
) -> Mapping[str, Part] | None:
    """Return the tensors that encode a weight, None if it is stored as floats."""
    if encoding is None or not encoding.encodes(name, shape):
        return None
    parts = encoding.parts(shape)
    first = encoding.beside(name, next(iter(parts)))
    return None if first not in tensors or tensors[first].stored in FLOATS else parts


def _stored(weight: Stored | Encoded) -> list[Stored]:
    return [weight] if isinstance(weight, Stored) else list(weight.parts.values())


def _checked(name: str, part: Part, tensors: Mapping[str, Stored]) -> Stored:
    """Return a tensor of the files. Raises UsageError if it is absent, or has another shape or dtype than `part`."""
    if name not in tensors:
        raise UsageError(f"The weights lack the tensor {name}; fetch the files again, or mend config.json.")
    one = tensors[name]
    if one.shape not in part.shapes:
        wanted = f"{list(part.shapes[0])} by config.json"
        raise UsageError(
            f"{one.file}: tensor {one.name} has shape {list(one.shape)} but {wanted}; use files of one model."
        )
    if one.stored not in part.stored:
        raise UsageError(
            f"{one.file}: tensor {one.name} is stored as {one.stored}; use a {', '.join(part.stored)} model."
        )
    return one


def _is_zero_bias(tensor: Stored) -> bool:
    """Return whether a tensor is a bias of zeros; only this tensor is read."""
    return tensor.name.endswith(".bias") and tensor.stored in FLOATS and not np.any(read_full(tensor))


def _open(file: Path) -> safe_open:
    check_regular(file)
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{file} is truncated or damaged ({reason}); fetch it again.") from error


def read_piece(tensor: Stored | Encoded, piece: Piece) -> np.ndarray:
    """Return a piece of a weight, as stored or in float32. Files are mapped per call, so their pages are released."""
    if isinstance(tensor, Stored):
        return dataclasses.replace(piece, rows=None).of(_read_rows(tensor, piece.rows))
    if isinstance(tensor.encoding, Mxfp4):  # tensors of many experts, of which only the piece's rows are decoded
        first, lanes = piece.lane or (0, 1)
        parts = {name: _read_rows(part, piece.rows)[:, first::lanes] for name, part in tensor.parts.items()}
        return dataclasses.replace(piece, rows=None, lane=None).of(tensor.encoding.decode(parts))
    parts = {name: read_full(part) for name, part in tensor.parts.items()}
    return piece.of(tensor.encoding.decode(parts, tensor.shape))


def _read_rows(tensor: Stored, rows: tuple[int, int] | None) -> np.ndarray:
    if rows is None:
        return read_full(tensor)
    with _open(tensor.file) as reader:
        return reader.get_slice(tensor.name)[slice(*rows)]


def read_full(tensor: Stored) -> np.ndarray:
    """Return a tensor in its stored dtype."""
    if tensor.stored in FLOAT8:
        return _read_bytes(tensor).view(FLOAT8[tensor.stored]).reshape(tensor.shape)
    with _open(tensor.file) as reader:
        return reader.get_tensor(tensor.name)


def _read_bytes(tensor: Stored) -> np.ndarray:
    """Return the bytes of a tensor of a validated file, because the library cannot convert 8-bit floats to NumPy."""
    with tensor.file.open("rb") as reader:
        length = int.from_bytes(reader.read(8), "little")
        begin, end = json.loads(reader.read(length))[tensor.name]["data_offsets"]
        return np.fromfile(reader, np.uint8, end - begin, offset=8 + length + begin - reader.tell())
