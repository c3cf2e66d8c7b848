"""Weights from files: a Hugging Face folder or a converted one, read tensor by tensor; and back again.

`hub.resolve` finds the folder, `load` reads it. config.json is checked before any weight is downloaded or
read, and the name, shape and dtype of every tensor before the first one is.

A tensor that the configuration does not call for is an error, since dropping it (a bias, a norm, a
layer) would change the text; only the ones in `INERT` are passed over.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from et_jax.errors import UsageError
from et_jax.io import checksums
from et_jax.io.schema import MAX_INDEX_BYTES, IndexFile, check_regular, checked, is_there, named, read_json
from et_jax.models.config import ModelConfig
from et_jax.models.families.registry import config_to_hugging_face, family_of, from_hugging_face
from et_jax.models.sources import Piece, Source, Sources, check_sources, tensor_shapes, tensors_of
from et_jax.models.transformer import Params, describe
from et_jax.models.weights import path_of_weight

INERT = re.compile(r"rotary_emb\.inv_freq$")
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
STORED_NAMES = {"bfloat16": "BF16", "float32": "F32"}
STORED = {"BF16": jnp.bfloat16, "F16": jnp.float32, "F32": jnp.float32}
CONVERTED = "orbax"


class Stored(NamedTuple):
    """A tensor as a file holds it: `stored` is its dtype in the words of safetensors."""

    file: Path
    name: str
    stored: str
    shape: tuple[int, ...]


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
        _check(config, sources_of(config), _headers(folder))


def stored_dtype(folder: Path, dtype: str = "auto") -> DTypeLike:
    """Return the dtype that `load` will most likely give the weights, from config.json alone."""
    values = read_json(folder / "config.json")
    said = str(values.get("dtype") or values.get("torch_dtype"))
    return DTYPES.get(dtype, STORED.get(STORED_NAMES.get(said, said), jnp.float32))


def load(folder: str | Path, dtype: str = "auto") -> tuple[ModelConfig, Params]:
    """Return the configuration and the weights in `folder`, cast once to `dtype`, on the default device.

    `auto` keeps the dtype in which the embedding is stored (bfloat16 or float32; float16 becomes float32).
    One tensor at a time passes through host memory. Raises UsageError naming the file or the tensor that
    is absent, damaged or of another shape.
    """
    folder = Path(folder)
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype {dtype} is not supported; use auto, {' or '.join(DTYPES)}.")
    config = read_config(folder)
    if (folder / CONVERTED).is_dir():
        return config, _restore(folder, config, dtype)
    sources = sources_of(config)
    tensors = _check(config, sources, _headers(folder))
    target = DTYPES.get(dtype, STORED[tensors[_embedding(sources)].stored])

    def read(piece: Piece) -> np.ndarray:
        return _read(tensors[piece.tensor], piece)

    leaves = [jax.block_until_ready(jax.device_put(one.read(read, target))) for one in sources.values()]
    return config, jax.tree.structure(describe(config)).unflatten(leaves)


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


def _restore(path: Path, config: ModelConfig, dtype: str) -> Params:
    """Return converted weights, cast to `dtype`, checked as those of a Hugging Face folder are."""
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
        tensors = _check(config, sources, found)
        target = DTYPES.get(dtype, STORED[tensors[_embedding(sources)].stored])
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(shape, target, sharding=sharding)
            for name, shape in tensor_shapes(sources).items()
        }
        try:
            return assemble(config, checkpointer.restore(folder, wanted))
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} is damaged; convert the model again.") from error


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
    """Return weights as the tensors that they are kept as in files."""
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


def _check(config: ModelConfig, sources: Sources, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return every tensor that the model is read from, by its own name, all of them checked.

    Only the embedding of a model without a head may be kept under another, the head's.
    """
    family = family_of(config)
    embedding, head = _embedding(sources), family.head
    found = {}
    for name, shape in tensor_shapes(sources).items():
        kept = head if name == embedding and config.tie_embeddings and name not in tensors else name
        if kept not in tensors:
            raise UsageError(f"The weights lack the tensor {name}; fetch the files again, or mend config.json.")
        one = found[name] = tensors[kept]
        if one.shape != shape:
            wanted = f"{list(shape)} by config.json"
            raise UsageError(
                f"{one.file}: tensor {kept} has shape {list(one.shape)} but {wanted}; use files of one model."
            )
        if one.stored not in STORED:
            raise UsageError(f"{one.file}: tensor {kept} is stored as {one.stored}; use a {', '.join(STORED)} model.")
    inert = {head} if config.tie_embeddings else set()
    for name in sorted(tensors.keys() - {one.name for one in found.values()} - inert):
        if not INERT.search(name) and not (family.apart and family.apart.match(name)):
            raise UsageError(f"{tensors[name].file}: tensor {name} has no place in this {config.architecture} model.")
    return found


def _open(file: Path) -> safe_open:
    check_regular(file)
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{file} is truncated or damaged ({reason}); fetch it again.") from error


def _read(tensor: Stored, piece: Piece) -> np.ndarray:
    """Return a piece of a tensor. The file is mapped for this piece alone, so its pages go with it."""
    with _open(tensor.file) as reader:
        return reader.get_tensor(tensor.name) if piece.rows is None else piece.of(reader.get_slice(tensor.name))
