"""Where a model lies on this machine, by its name and without a download."""

import os
from pathlib import Path

from et_jax.io.gguf import gguf_in, is_gguf
from et_jax.models.bundled import bundled_folder, is_bundled
from et_jax.models.packaged import PACKAGED, packaged_file


def local_model(name: str | Path) -> Path | None:
    """Return the folder or the GGUF file of a model, None where there is none.

    `name` is that of a bundled model, of one in an installed package, or a path. A folder that holds one GGUF file and
    no config.json stands for that file. Raises UsageError for a package that is not installed, and for several files.
    """
    if is_bundled(name):
        return bundled_folder(str(name))
    if str(name) in PACKAGED:
        return packaged_file(str(name))
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # no, where there can be no such name
        return gguf_in(Path(path)) or Path(path)
    return Path(path) if is_gguf(path) and os.path.isfile(path) else None
