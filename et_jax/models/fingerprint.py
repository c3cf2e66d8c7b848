"""A short name for what a model's files hold, without reading every byte of its weights."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.io.gguf import is_gguf, parts_of, read_gguf

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "orbax/**/*")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PIECES, _PIECE_BYTES = 64, 2**16
_FEW_BYTES = 2**12  # of a piece of one array among many


def fingerprint(model: Path, adapter: Path | None = None) -> str:
    """Return a digest of the files that make a model: those of a folder, or a GGUF file with its other parts.

    Those of an `adapter` that is merged into it count too.

    Of a folder's files names, sizes and, at 64 places, the bytes count; of GGUF files sizes, headers and such places of
    the tensors. What is up to 4 MiB counts in full. Weights trained further differ everywhere, so that places are
    enough. A GGUF file may be renamed. Raises UsageError for a GGUF file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    if adapter is not None:
        _add_files(digest, adapter, (adapter / name for name in ADAPTER))
    if is_gguf(model):
        places = read_gguf(model).tensors.values()
        for number, part in enumerate(parts_of(model)):
            size = part.stat().st_size
            header = min((place.begin for place in places if place.file == part), default=size)
            digest.update(f"part {number} {size}\n".encode())
            with part.open("rb") as reader:
                digest.update(reader.read(header))
                _add_pieces(digest, reader, header, size)
        return digest.hexdigest()
    files = {file for pattern in PATTERNS for file in model.glob(pattern) if file.is_file()}
    _add_files(digest, model, files)
    return digest.hexdigest()


def adapter_fingerprint(adapter: Path) -> str:
    """Return a digest of the files of an adapter."""
    digest = hashlib.blake2b(digest_size=16)
    _add_files(digest, adapter, (adapter / name for name in ADAPTER))
    return digest.hexdigest()


def weights_fingerprint(weights: Any) -> str:
    """Return a digest of the weights of a model in memory: of each array its place, shape, dtype and 16 pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(weights):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}\n".encode())
        for begin in np.linspace(0, max(len(array) - _FEW_BYTES, 0), 16).astype(int):
            digest.update(array[begin : begin + _FEW_BYTES].data)
    return digest.hexdigest()


def _add_files(digest: "hashlib._Hash", folder: Path, files: Iterable[Path]) -> None:
    """Digest the names, sizes and pieces of the files of a folder."""
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        with file.open("rb") as reader:
            _add_pieces(digest, reader, 0, size)


def _add_pieces(digest: "hashlib._Hash", reader: BinaryIO, begin: int, end: int) -> None:
    """Digest 64 pieces of a file between two bytes, evenly spaced where they do not cover it."""
    for i in range(_PIECES):
        reader.seek(begin + max(i * _PIECE_BYTES, i * (end - begin - _PIECE_BYTES) // (_PIECES - 1)))
        digest.update(reader.read(_PIECE_BYTES))
