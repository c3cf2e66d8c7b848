"""Weights from files: a Hugging Face folder or a converted one, read tensor by tensor; and back again.

`hub.resolve` finds the folder, `load` reads it. config.json is checked before any weight is downloaded or
read, and the name, shape and dtype of every tensor before the first one is.

A tensor that the configuration does not call for is an error, since dropping it (a bias, a norm, a
layer) would change the text; only the ones in `INERT` are passed over, and beside quantised weights those of
`ACTIVATIONS` and biases of zeros, which some tools write.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from et_jax.errors import UsageError
from et_jax.io import checksums
from et_jax.io.schema import MAX_INDEX_BYTES, IndexFile, check_regular, checked, is_there, named, read_json
from et_jax.models.config import ModelConfig
from et_jax.models.encodings import FLOATS, WEIGHT, Encoding, Mxfp4, Part, Scaled, encoding_of
from et_jax.models.families.registry import config_to_hugging_face, family_of, from_hugging_face
from et_jax.models.sources import Piece, Source, Sources, check_sources, tensor_shapes, tensors_of
from et_jax.models.transformer import Params, describe, in_stacks
from et_jax.models.weights import (
    QUANTIZED,
    Dense,
    Int8,
    is_weight,
    looked_up,
    nodes,
    path_of_weight,
    quantized,
    to_int8,
)
from et_jax.types import replace

INERT = re.compile(r"rotary_emb\.inv_freq$")
ACTIVATIONS = re.compile(r"\.(input_scale|activation_scale|[kqv]_scale|weight_shape)$")
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
STORED_NAMES = {"bfloat16": "BF16", "float32": "F32"}
STORED = {"BF16": jnp.bfloat16, "F16": jnp.float32, "F32": jnp.float32}
FLOAT8 = {"F8_E4M3": jnp.float8_e4m3fn}
CONVERTED = "orbax"


class Stored(NamedTuple):
    """A tensor as a file holds it: `stored` is its dtype in the words of safetensors."""

    file: Path
    name: str
    stored: str
    shape: tuple[int, ...]


class Encoded(NamedTuple):
    """A weight that is stored as several tensors, `parts` by the last words of their names."""

    encoding: Encoding
    parts: Mapping[str, Stored]
    shape: tuple[int, ...]


Tensors = Mapping[str, Stored | Encoded]
"""The weights that a model is read from, by the names that their tensors have as floats."""


def sources_of(config: ModelConfig) -> Sources:
    """Return where each leaf of `Params` lies in the files of such a model, in the order of the leaves."""
    leaves = jax.tree.leaves_with_path(describe(config))
    shapes = {
        jax.tree_util.keystr(path_of_weight(path), simple=True, separator="."): spec.shape for path, spec in leaves
    }
    sources = family_of(config).sources(shapes)
    check_sources(sources, shapes)
    return {leaf: sources[leaf] for leaf in shapes}


def assemble(config: ModelConfig, tensors: Mapping[str, Float[Array | np.ndarray, "..."]]) -> Params:
    """Return the `Params` of tensors given by their names in files."""

    def put_together(source: Source) -> Any:
        parts = [piece.of(tensors[piece.tensor]) for piece in source.pieces]
        if source.stacked:
            return jnp.stack(parts)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    leaves = [put_together(source) for source in sources_of(config).values()]
    return jax.tree.structure(describe(config)).unflatten(leaves)


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in `folder`/config.json. Raises UsageError where it is absent or unreadable."""
    return from_hugging_face(read_json(folder / "config.json"), str(folder / "config.json"))


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raise UsageError where the headers of a folder's weights are not those of such a model; no weight is read.

    Converted weights are compared when they are restored.
    """
    if not (folder / CONVERTED).is_dir():
        _check(config, sources_of(config), _headers(folder), _encoding(folder))


def stored_dtype(folder: Path, dtype: str = "auto") -> DTypeLike:
    """Return the dtype that `load` will most likely give the weights, from config.json alone."""
    values = read_json(folder / "config.json")
    said = str(values.get("dtype") or values.get("torch_dtype"))
    return _dtype(dtype, STORED_NAMES.get(said, said), _encoding(folder))


def load(
    folder: str | Path, dtype: str = "auto", quantize: str | None = None, *, stacked: bool = False
) -> tuple[ModelConfig, Params]:
    """Return the configuration and the weights in `folder`, cast once to `dtype`, on the default device.

    Layers that are alike may be `stacked` (`models.stacks`): each array is put where it belongs as it is read.

    `auto` keeps the dtype in which the embedding is stored (bfloat16 or float32; float16 becomes float32); of weights
    that are stored quantised it is bfloat16. With `quantize` "int8" matrices are `Int8`: those that are stored so, by
    output, as they lie, and others rounded from what is stored. One leaf at a time passes through host memory, but
    that converted weights are restored whole. Raises UsageError naming the file or the tensor that is absent, damaged
    or of another shape.
    """
    folder = Path(folder)
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype {dtype} is not supported; use auto, {' or '.join(DTYPES)}.")
    if quantize not in (None, *QUANTIZED):
        raise UsageError(f"quantize {quantize} is not supported; use {' or '.join(QUANTIZED)}, or leave it out.")
    config = read_config(folder)
    if (folder / CONVERTED).is_dir():
        return config, _restore(folder, config, dtype, quantize, stacked)
    sources, encoding = sources_of(config), _encoding(folder)
    tensors = _check(config, sources, _headers(folder), encoding)
    target = _dtype(dtype, _stored_as(tensors[_embedding(sources)]), encoding)

    def node(described: Any, source: Source) -> Any:
        if not is_weight(described):
            return source.read(read, target)
        return Dense(array=source.read(read, target)) if quantize is None else _int8(source, tensors, target)

    def read(piece: Piece) -> np.ndarray:
        return _read(tensors[piece.tensor], piece)

    kinds, structure = jax.tree.flatten(describe(config), is_leaf=is_weight)
    nodes = [partial(node, kind, source) for kind, source in zip(kinds, sources.values(), strict=True)]
    return config, _put_in_place(config, structure.unflatten(nodes), stacked)


def _put_in_place(config: ModelConfig, nodes: Params, stacked: bool) -> Params:
    """Return the weights that functions give, one of them asked at a time, on the default device."""

    def put(node: Callable[[], Any]) -> Any:
        return jax.block_until_ready(jax.device_put(node()))

    def joined(*nodes: Callable[[], Any]) -> Callable[[], Any]:
        def stack() -> Any:
            one = put(nodes[0])
            held = jax.tree.map(lambda x: jnp.zeros((len(nodes), *x.shape), x.dtype), one)
            for turn, node in enumerate(nodes):
                held = jax.block_until_ready(_put_at(held, put(node) if turn else one, turn))
            return held

        return stack

    params = jax.tree.map(put, in_stacks(nodes, config, joined) if stacked else nodes)
    return replace(params, embedding=looked_up(params.embedding))


@partial(jax.jit, donate_argnums=0)
def _put_at(stack: Any, one: Any, turn: Int[Array, ""]) -> Any:
    """The arrays of a stack with one layer's at its turn."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, turn, 0), stack, one)


def write_hugging_face(folder: str | Path, config: ModelConfig, params: Params) -> None:
    """Write config.json and model.safetensors, as `load` and other readers take them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(config, jax.tree.map(np.asarray, params))
    _write_config(folder, config, params)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The library leaves its file readable by the owner alone.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def save_converted(path: str | Path, config: ModelConfig, params: Params) -> None:
    """Write config.json and the weights as an orbax checkpoint with checksums, which `load` takes too."""
    import orbax.checkpoint

    path = Path(path).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / CONVERTED, _tensors(config, params), force=True)
    checksums.seal(path / CONVERTED)
    _write_config(path, config, params)


def restore_converted(path: str | Path) -> tuple[ModelConfig, Params]:
    """Return what `save_converted` wrote, bit for bit. Raises UsageError where the folder holds no such thing."""
    path = Path(path)
    if not (path / CONVERTED).is_dir():
        raise UsageError(f"{path} holds no converted weights ({CONVERTED}/); convert the model into it first.")
    config = read_config(path)
    return config, _restore(path, config, "auto")


def _restore(path: Path, config: ModelConfig, dtype: str, quantize: str | None = None, stacked: bool = False) -> Params:
    """Return converted weights, cast to `dtype` or quantised, checked as those of a Hugging Face folder are."""
    import orbax.checkpoint

    folder = path.absolute() / CONVERTED
    checksums.check(folder, "convert the model again")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder).item_metadata.tree
        except (AttributeError, OSError, ValueError) as error:
            raise UsageError(f"{folder} is damaged; convert the model again.") from error
        found = {
            name: Stored(folder, name, STORED_NAMES.get(str(m.dtype), str(m.dtype)), m.shape)
            for name, m in metadata.items()
        }
        sources = sources_of(config)
        tensors = _check(config, sources, found, None)
        target = _dtype(dtype, _stored_as(tensors[_embedding(sources)]), None)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def read_as(name: str) -> DTypeLike:
            return target if quantize is None else STORED[_stored_as(tensors[name])]

        wanted = {
            name: jax.ShapeDtypeStruct(shape, read_as(name), sharding=sharding)
            for name, shape in tensor_shapes(sources).items()
        }
        try:
            params = assemble(config, checkpointer.restore(folder, wanted))
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} is damaged; convert the model again.") from error
    if quantize is not None:
        params = quantized(params, target)
    if not stacked:
        return params
    found, structure = jax.tree.flatten(params, is_leaf=is_weight)
    held = dict(enumerate(found))
    del params, found  # so that each array is let go once it is in its stack
    return _put_in_place(config, structure.unflatten([partial(held.pop, number) for number in sorted(held)]), True)


def _encoding(folder: Path) -> Encoding | None:
    """Return how the matrices of a folder are stored, None where they are floats."""
    file = folder / "config.json"
    return encoding_of(read_json(file).get("quantization_config"), str(file))


def _dtype(asked: str, embedding: str, encoding: Encoding | None) -> DTypeLike:
    """Return the dtype of a model's floats, whose embedding is stored as `embedding`."""
    usual = STORED.get(embedding, jnp.float32) if encoding is None else jnp.bfloat16
    return DTYPES.get(asked, usual)


def _stored_as(tensor: Stored | Encoded) -> str:
    """Return the dtype of a tensor, that of the numbers of one that is encoded, in the words of safetensors."""
    return tensor.stored if isinstance(tensor, Stored) else "F32"


def _int8(source: Source, tensors: Tensors, dtype: DTypeLike) -> Int8:
    """Return a leaf in 8 bits: as it is stored, where it is one weight of such numbers by output, or rounded."""
    stored = [tensors[piece.tensor] for piece in source.pieces]
    first, encoding = stored[0], getattr(stored[0], "encoding", None)
    if isinstance(first, Encoded) and isinstance(encoding, Scaled) and encoding.by_output and source.is_whole:
        parts = {name: _read_whole(part) for name, part in first.parts.items()}
        scale = parts[encoding.scale].astype(np.float32).reshape(-1)
        return Int8(array=parts[WEIGHT], scale=scale, dtype=np.dtype(dtype))
    wide = jnp.bfloat16 if all(_stored_as(one) == "BF16" for one in stored) else np.float32
    return to_int8(source.read(lambda piece: _read(tensors[piece.tensor], piece), wide), dtype)


def _write_config(folder: Path, config: ModelConfig, params: Params) -> None:
    values = config_to_hugging_face(config) | {"torch_dtype": str(params.embedding.dtype)}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _shard_files(folder: Path) -> Iterable[Path]:
    """Return the safetensors files of a folder: those the index names, or the single one."""
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
    """Return `name` if it is that of a file in the model's own folder. Links in it are its owner's business."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or PureWindowsPath(name).drive:
        raise UsageError(f"{index}: weight_map names {named(name)}, which leaves the folder; fetch the file again.")
    if not path.parts or not name.isprintable():
        raise UsageError(f"{index}: weight_map names {named(name)}, which is no file name; fetch the file again.")
    return name


def _tensors(config: ModelConfig, params: Params) -> dict[str, Any]:
    """Return weights as the tensors that they are kept as in files. Raises ValueError for quantised ones."""
    if any(isinstance(node, Int8) for node in nodes(params)):
        raise ValueError("params: got weights in 8 bits, wanted floats; quantise them when they are loaded")
    sources = sources_of(config)
    return tensors_of(sources, dict(zip(sources, jax.tree.leaves(params), strict=True)))


def _embedding(sources: Sources) -> str:
    """Return the tensor that the embedding begins with, whose dtype is the model's."""
    return sources["embedding"].pieces[0].tensor


def _headers(folder: Path) -> dict[str, Stored]:
    """Return what the files of the folder say of every tensor."""
    tensors = {}
    for file in _shard_files(folder):
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if name in tensors:
                    raise UsageError(
                        f"{name} stands in {tensors[name].file.name} and in {file}; use files of one model."
                    )
                piece = reader.get_slice(name)
                tensors[name] = Stored(file, name, piece.get_dtype(), tuple(piece.get_shape()))
    return tensors


def _check(config: ModelConfig, sources: Sources, tensors: Mapping[str, Stored], encoding: Encoding | None) -> Tensors:
    """Return every weight that the model is read from, by its own name, all of them checked.

    Only the embedding of a model without a head may be kept under another, the head's.
    """
    family = family_of(config)
    embedding, head = _embedding(sources), family.head
    found: dict[str, Stored | Encoded] = {}
    for name, shape in tensor_shapes(sources).items():
        kept = head if name == embedding and config.tie_embeddings and name not in tensors else name
        parts = _parts(kept, shape, tensors, encoding)
        if parts is None or encoding is None:
            found[name] = _checked(kept, Part(tuple(STORED), (shape,)), tensors)
        else:
            checked = {last: _checked(encoding.beside(kept, last), part, tensors) for last, part in parts.items()}
            found[name] = Encoded(encoding, checked, shape)
    inert = {head} if config.tie_embeddings else set()
    used = {one.name for weight in found.values() for one in _stored(weight)}
    for name in sorted(tensors.keys() - used - inert):
        passed = INERT.search(name) or (family.apart and family.apart.match(name))
        passed = passed or (encoding and (ACTIVATIONS.search(name) or _is_zero_bias(tensors[name])))
        if not passed:
            raise UsageError(f"{tensors[name].file}: tensor {name} has no place in this {config.architecture} model.")
    return found


def _parts(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Stored], encoding: Encoding | None
) -> Mapping[str, Part] | None:
    """Return the tensors that stand for a weight, None where it is stored as floats."""
    if encoding is None or not encoding.encodes(name, shape):
        return None
    parts = encoding.parts(shape)
    first = encoding.beside(name, next(iter(parts)))
    return None if first not in tensors or tensors[first].stored in FLOATS else parts


def _stored(weight: Stored | Encoded) -> list[Stored]:
    return [weight] if isinstance(weight, Stored) else list(weight.parts.values())


def _checked(name: str, part: Part, tensors: Mapping[str, Stored]) -> Stored:
    """Return a tensor of the files. Raises UsageError where it is not there, or is not what it is to be."""
    if name not in tensors:
        raise UsageError(f"The weights lack the tensor {name}; fetch the files again, or mend config.json.")
    one = tensors[name]
    if one.shape not in part.shapes:
        wanted = f"{list(part.shapes[0])} by config.json"
        raise UsageError(f"{one.file}: tensor {name} has shape {list(one.shape)} but {wanted}; use files of one model.")
    if one.stored not in part.stored:
        raise UsageError(f"{one.file}: tensor {name} is stored as {one.stored}; use a {', '.join(part.stored)} model.")
    return one


def _is_zero_bias(tensor: Stored) -> bool:
    """Return whether a tensor is a bias that adds nothing. Nothing else is read of the files for it."""
    return tensor.name.endswith(".bias") and tensor.stored in FLOATS and not np.any(_read_whole(tensor))


def _open(file: Path) -> safe_open:
    check_regular(file)
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{file} is truncated or damaged ({reason}); fetch it again.") from error


def _read(tensor: Stored | Encoded, piece: Piece) -> np.ndarray:
    """Return a piece of a weight, as it is stored or in float32. Files are mapped for it alone, so their pages go."""
    if isinstance(tensor, Stored):
        return dataclasses.replace(piece, rows=None).of(_read_rows(tensor, piece.rows))
    if isinstance(tensor.encoding, Mxfp4):  # of the tensors of many experts, what the piece is of
        first, lanes = piece.lane or (0, 1)
        parts = {name: _read_rows(part, piece.rows)[:, first::lanes] for name, part in tensor.parts.items()}
        return dataclasses.replace(piece, rows=None, lane=None).of(tensor.encoding.decode(parts))
    parts = {name: _read_whole(part) for name, part in tensor.parts.items()}
    return piece.of(tensor.encoding.decode(parts, tensor.shape))


def _read_rows(tensor: Stored, rows: tuple[int, int] | None) -> np.ndarray:
    if rows is None:
        return _read_whole(tensor)
    with _open(tensor.file) as reader:
        return reader.get_slice(tensor.name)[slice(*rows)]


def _read_whole(tensor: Stored) -> np.ndarray:
    if tensor.stored in FLOAT8:
        return _read_bytes(tensor).view(FLOAT8[tensor.stored]).reshape(tensor.shape)
    with _open(tensor.file) as reader:
        return reader.get_tensor(tensor.name)


def _read_bytes(tensor: Stored) -> np.ndarray:
    """Return the bytes of a tensor of a file that has been opened: the library gives no floats of 8 bits to NumPy."""
    with tensor.file.open("rb") as reader:
        length = int.from_bytes(reader.read(8), "little")
        begin, end = json.loads(reader.read(length))[tensor.name]["data_offsets"]
        return np.fromfile(reader, np.uint8, end - begin, offset=8 + length + begin - reader.tell())
