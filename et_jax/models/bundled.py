"""Where the bundled model lies: a Hugging Face folder of about 8 MB inside the package."""

from pathlib import Path


def bundled_folder() -> Path:
    """Return the folder of the model that is installed with the package."""
    return Path(__file__).parent / "bundled"


def named_folder(name: str) -> Path | None:
    """Return the folder that `name` has on this machine without a download: the bundled one, or a path."""
    folder = bundled_folder() if name == "bundled" else Path(name).expanduser()
    return folder if folder.is_dir() else None
