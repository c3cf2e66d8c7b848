"""A digest of the package's own sources, valid if they are the ones that this process has imported."""

import functools
import hashlib
import time
from pathlib import Path

IMPORTED = time.time()
"""When this process began to import them; the package imports this module first."""

_ROOT = Path(__file__).parent.parent
_MARGIN = 1.0  # seconds by which the file system's clock and the process's may differ


@functools.cache
def digest() -> str | None:
    """Return a digest of all sources and of the tables beside kernels, None if one was changed since the import."""
    combined = hashlib.blake2b(digest_size=32)
    files = sorted([*_ROOT.rglob("*.py"), *_ROOT.glob("pallas/**/*.json")])
    for file in files:
        if file.stat().st_ctime > IMPORTED - _MARGIN:
            return None
        text = file.read_bytes()
        combined.update(f"{file.relative_to(_ROOT)} {len(text)}\n".encode() + text)
    return combined.hexdigest() if files else None
