"""Small pictures for the documentation: matplotlib without a screen, saved with few colours."""

from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

FIGURES = Path(__file__).resolve().parents[1] / "docs/figures"


def save(figure: Figure, path: Path) -> int:
    """Write `figure` to `path` as a PNG of 64 colours, and return its bytes."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    return path.stat().st_size
