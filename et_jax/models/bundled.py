"""Where the bundled model lies: a Hugging Face folder of about 8 MB inside the package."""

from pathlib import Path


def bundled_folder() -> Path:
    """Return the folder of the model that is installed with the package."""
    return Path(__file__).parent / "bundled"
