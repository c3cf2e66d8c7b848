"""Where the bundled models lie: Hugging Face folders inside the package, one of about 8 MB and one of about 1.5."""

from pathlib import Path

_FOLDERS = {"bundled": "bundled", "bundled-small": "bundled_small"}


def is_bundled(name: str | Path) -> bool:
    """Return whether `name` is that of a model which is installed with the package."""
    return str(name) in _FOLDERS


def bundled_folder(name: str = "bundled") -> Path:
    """Return the folder of a model that is installed with the package."""
    return Path(__file__).parent / _FOLDERS[name]
