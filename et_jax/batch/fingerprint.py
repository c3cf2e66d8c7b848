"""A short name for what a model's files hold, without reading every byte of its weights."""

import hashlib
from pathlib import Path

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "orbax/**/*")
_PIECES, _PIECE_BYTES = 64, 2**16


def fingerprint(folder: Path) -> str:
    """Return a digest of the names, the sizes and, at 64 places, the bytes of the files that make a model.

    Files of up to 4 MiB count whole. Weights trained further differ everywhere, so that places are enough.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = {file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        with file.open("rb") as reader:
            for i in range(_PIECES):
                reader.seek(max(i * _PIECE_BYTES, i * (size - _PIECE_BYTES) // (_PIECES - 1)))
                digest.update(reader.read(_PIECE_BYTES))
    return digest.hexdigest()
