"""Reads weights tensor by tensor from a Hugging Face folder, a converted folder or a GGUF file, and writes them.

`hub.resolve` finds the folder, `load` reads it. config.json is checked before any weight is downloaded or read, and the
headers of all tensors (`models.stored`, `models.gguf`) before the first is read. `folder` may be a GGUF file.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from safetensors.numpy import save_file

from et_jax.errors import UsageError
from et_jax.io import checksums
from et_jax.io.gguf import GgufTensor, is_gguf
from et_jax.io.json_files import read_json
from et_jax.models import gguf
from et_jax.models.config import ModelConfig
from et_jax.models.encodings import Encoding, encoding_of
from et_jax.models.families.registry import config_to_hugging_face, family_of, from_hugging_face
from et_jax.models.params import Params, describe
from et_jax.models.placing import cast, put_in_place, read_int8
from et_jax.models.sources import Piece, Shape, Source, Sources, check_sources, tensor_shapes, tensors_of
from et_jax.models.stored import (
    STORED,
    Stored,
    Tensors,
    check,
    embedding_of,
    has_own_head,
    headers,
    read_piece,
    stored_as,
)
from et_jax.models.weights import (
    QUANTIZED,
    Dense,
    Int8,
    is_weight,
    nodes,
    path_of_weight,
    quantized,
)
from et_jax.types import replace

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
HALF = "F16"
STORED_NAMES = {"bfloat16": "BF16", "float32": "F32", "float16": HALF}
CONVERTED = "orbax"
Added = Callable[[str], np.ndarray | None]
"""Returns the float32 array to add to a leaf of `Params`, by the leaf's name, or None."""


def sources_of(
    config: ModelConfig, sources: Callable[[ModelConfig, Mapping[str, Shape]], Sources] | None = None
) -> Sources:
    """Return the source of each leaf of `Params` in the files of such a model, in the order of the leaves.

    `sources` computes it if the files do not have the family's format.
    """
    leaves = jax.tree.leaves_with_path(describe(config))
    shapes = {
        jax.tree_util.keystr(path_of_weight(path), simple=True, separator="."): spec.shape for path, spec in leaves
    }
    found = family_of(config).sources(shapes) if sources is None else sources(config, shapes)
    check_sources(found, shapes)
    return {leaf: found[leaf] for leaf in shapes}


def assemble(config: ModelConfig, tensors: Mapping[str, Float[Array | np.ndarray, "..."]]) -> Params:
    """Return the `Params` of tensors, given by their names in files."""

    def put_together(source: Source) -> Any:
        parts = [piece.of(tensors[piece.tensor]) for piece in source.pieces]
        if source.stacked:
            return jnp.stack(parts)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    leaves = [put_together(source) for source in sources_of(config).values()]
    return jax.tree.structure(describe(config)).unflatten(leaves)


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in `folder`/config.json, or that of a GGUF file.

    Raises UsageError if it is absent or unreadable.
    """
    if is_gguf(folder):
        return gguf.read_config(folder)
    return from_hugging_face(read_json(folder / "config.json"), str(folder / "config.json"))


def read_model(folder: Path) -> ModelConfig:
    """Return the configuration of the model in a folder's files: that of config.json, possibly with an untied head.

    If config.json ties the head to the embedding but the files have a different head, that head is used, as in
    transformers from version 5 on. Raises UsageError as `read_config` does, and if the files cannot be read.
    """
    config = read_config(folder)
    if not config.tie_embeddings or is_gguf(folder) or (folder / CONVERTED).is_dir():
        return config
    return replace(config, tie_embeddings=not has_own_head(config, sources_of(config), headers(folder)))


def remarks(folder: Path, model: ModelConfig, dtype: str = "auto") -> list[str]:
    """Return sentences on how `load` interprets the files of a `read_model`, if that may be unexpected."""
    if (folder / CONVERTED).is_dir():
        return []
    said = []
    if model != read_config(folder):
        head = family_of(model).head
        said.append(
            f"{folder}: config.json ties the output head to the embedding, but {head} differs from it; {head} is used "
            "as the head."
        )
    sources, tensors, encoding = _located(folder, model)
    if encoding is None and dtype == "auto" and stored_as(tensors[embedding_of(sources)]) == HALF:
        said.append(
            f"{folder}: float16 weights are converted to float32, which takes twice the memory and bandwidth; for "
            'bfloat16 use --dtype bfloat16, or load(dtype="bfloat16").'
        )
    return said


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raise UsageError if the headers of a folder's weights do not match the model; no weight is read.

    Converted weights are checked when they are restored.
    """
    if not (folder / CONVERTED).is_dir():
        _located(folder, config)


def _located(folder: Path, config: ModelConfig) -> tuple[Sources, Tensors, Encoding | None]:
    """Return the sources of a model's leaves, its checked tensors, and the encoding of its matrices."""
    if is_gguf(folder):
        sources = sources_of(config, gguf.sources)
        return sources, gguf.check(folder, config, sources), None
    sources, encoding = sources_of(config), _encoding(folder)
    return sources, check(config, sources, headers(folder), encoding), encoding


def stored_dtype(folder: Path, dtype: str = "auto") -> DTypeLike:
    """Return the dtype that `load` will most likely give the weights, from config.json alone."""
    return _dtype(dtype, _said_dtype(folder), _encoding(folder))


def loaded_dtype(folder: Path, model: ModelConfig, dtype: str = "auto") -> DTypeLike:
    """Return the dtype that `load` gives the weights of a `read_model`, by the headers of its files."""
    if (folder / CONVERTED).is_dir():
        return stored_dtype(folder, dtype)
    sources, tensors, encoding = _located(folder, model)
    return _dtype(dtype, stored_as(tensors[embedding_of(sources)]), encoding)


def is_widened(folder: Path, dtype: str = "auto") -> bool:
    """Return whether `load` will most likely convert float16 weights to float32, from config.json alone."""
    return dtype == "auto" and _said_dtype(folder) == HALF and _encoding(folder) is None


def _said_dtype(folder: Path) -> str:
    """Return the dtype that config.json names, by its safetensors name if it has one."""
    if is_gguf(folder):
        return gguf.embedding_stored_as(folder)
    values = read_json(folder / "config.json")
    said = str(values.get("dtype") or values.get("torch_dtype"))
    return STORED_NAMES.get(said, said)


def load(
    folder: str | Path,
    dtype: str = "auto",
    quantize: str | None = None,
    *,
    stacked: bool = False,
    mesh: Mesh | None = None,
    added: Added | None = None,
) -> tuple[ModelConfig, Params]:
    """Return the configuration and the weights in `folder`, cast once to `dtype`, on the default device.

    Over a `mesh` each chip receives its part of every array (`models.sharding`).

    Equal layers may be `stacked` (`models.stacks`): each array is written into its stack when it is read.

    `auto` uses the dtype in which the embedding is stored (bfloat16 or float32; float16 becomes float32); for weights
    that are stored quantised it is bfloat16. With `quantize` "int8" matrices are `Int8`: those stored in int8 with
    scales per output are used unchanged, others are rounded. Leaves pass through host memory one at a time, except that
    converted weights are restored at once. The array that `added` returns for a leaf, in float32, is added to it before
    it is cast or rounded. The configuration is that of `read_model`. Raises UsageError naming the file or the tensor
    that is absent, damaged or of another shape.
    """
    folder = Path(folder)
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype {dtype} is not supported; use auto, {' or '.join(DTYPES)}.")
    if quantize not in (None, *QUANTIZED):
        raise UsageError(f"quantize {quantize} is not supported; use {' or '.join(QUANTIZED)}, or leave it out.")
    config = read_model(folder)
    if (folder / CONVERTED).is_dir():
        if added is not None:
            raise UsageError(f"{folder} holds converted weights, which take no adapter; name the folder they are from.")
        return _restore(folder, config, dtype, quantize, stacked, mesh)
    sources, tensors, encoding = _located(folder, config)
    target = _dtype(dtype, stored_as(tensors[embedding_of(sources)]), encoding)

    def node(described: Any, leaf: str, source: Source) -> Any:
        if added is not None and (more := added(leaf)) is not None:
            more += source.read(read, np.float32)
            return cast(described, more, target, quantize)
        if not is_weight(described):
            return source.read(read, target)
        return Dense(array=source.read(read, target)) if quantize is None else read_int8(source, tensors, read, target)

    def read(piece: Piece) -> np.ndarray:
        tensor = tensors[piece.tensor]
        return gguf.read(tensor, piece, config) if isinstance(tensor, GgufTensor) else read_piece(tensor, piece)

    kinds, structure = jax.tree.flatten(describe(config), is_leaf=is_weight)
    nodes = [partial(node, kind, *source) for kind, source in zip(kinds, sources.items(), strict=True)]
    return put_in_place(config, structure.unflatten(nodes), stacked, mesh, target, quantize)


def write_hugging_face(folder: str | Path, config: ModelConfig, params: Params) -> None:
    """Write config.json and model.safetensors, which `load` and other readers accept."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(config, jax.tree.map(np.asarray, params))
    _write_config(folder, config, params)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The library creates a file that only its owner can read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def save_converted(path: str | Path, config: ModelConfig, params: Params) -> None:
    """Write config.json and the weights as an orbax checkpoint with checksums, which `load` also accepts."""
    import orbax.checkpoint

    path = Path(path).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / CONVERTED, _tensors(config, params), force=True)
    checksums.seal(path / CONVERTED)
    _write_config(path, config, params)


def restore_converted(path: str | Path) -> tuple[ModelConfig, Params]:
    """Return the model that `save_converted` wrote, bit for bit. Raises UsageError if the folder has no such model."""
    path = Path(path)
    if not (path / CONVERTED).is_dir():
        raise UsageError(f"{path} holds no converted weights ({CONVERTED}/); convert the model into it first.")
    config = read_config(path)
    return _restore(path, config, "auto")


def _restore(
    path: Path,
    config: ModelConfig,
    dtype: str,
    quantize: str | None = None,
    stacked: bool = False,
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Return a model and its converted weights, cast or quantised, with the checks of a Hugging Face folder."""
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
        tensors = check(config, sources, found, None)
        target = _dtype(dtype, stored_as(tensors[embedding_of(sources)]), None)
        home = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def read_as(name: str) -> DTypeLike:
            return target if quantize is None else STORED[stored_as(tensors[name])]

        wanted = {
            name: jax.ShapeDtypeStruct(shape, read_as(name), sharding=home)
            for name, shape in tensor_shapes(sources).items()
        }
        try:
            params = assemble(config, checkpointer.restore(folder, wanted))
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} is damaged; convert the model again.") from error
    if quantize is not None:
        params = quantized(params, target)
    if not stacked and mesh is None:
        return config, params
    found, structure = jax.tree.flatten(params, is_leaf=is_weight)
    held = dict(enumerate(found))
    del params, found  # so that each array is freed once it is in its stack
    nodes = structure.unflatten([partial(held.pop, number) for number in sorted(held)])
    return put_in_place(config, nodes, stacked, mesh, target, quantize)


def _encoding(folder: Path) -> Encoding | None:
    """Return the encoding of a folder's matrices; None for floats and for GGUF, whose tensors specify it."""
    if is_gguf(folder):
        return None
    file = folder / "config.json"
    return encoding_of(read_json(file).get("quantization_config"), str(file))


def _dtype(asked: str, embedding: str, encoding: Encoding | None) -> DTypeLike:
    """Return the dtype of a model's floats, whose embedding is stored as `embedding`."""
    quantised = encoding is not None or embedding == gguf.QUANTISED
    usual = jnp.bfloat16 if quantised else STORED.get(embedding, jnp.float32)
    return DTYPES.get(asked, usual)


def _write_config(folder: Path, config: ModelConfig, params: Params) -> None:
    values = config_to_hugging_face(config) | {"torch_dtype": str(params.embedding.dtype)}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _tensors(config: ModelConfig, params: Params) -> dict[str, Any]:
    """Return weights as the tensors of files. Raises ValueError for quantised weights."""
    if any(isinstance(node, Int8) for node in nodes(params)):
        raise ValueError("params: got weights in 8 bits, wanted floats; quantise them when they are loaded")
    sources = sources_of(config)
    return tensors_of(sources, dict(zip(sources, jax.tree.leaves(params), strict=True)))
