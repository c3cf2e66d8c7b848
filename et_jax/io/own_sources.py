"""The package's own sources: a digest of them, where they are what this process has imported."""

import functools
import hashlib
import time
from pathlib import Path

IMPORTED = time.time()
"""When this process began to import them, for the package imports this module first."""

_ROOT = Path(__file__).parent.parent
_MARGIN = 1.0  # seconds by which the clock of a file system and the process's may differ


@functools.cache
def digest() -> str | None:
    """Return a digest of all sources and of the tables beside kernels, None where one was changed since the import."""
    whole = hashlib.blake2b(digest_size=32)
    files = sorted([*_ROOT.rglob("*.py"), *_ROOT.glob("pallas/**/*.json")])
    for file in files:
        if file.stat().st_ctime > IMPORTED - _MARGIN:
            return None
        text = file.read_bytes()
        whole.update(f"{file.relative_to(_ROOT)} {len(text)}\n".encode() + text)
    return whole.hexdigest() if files else None
