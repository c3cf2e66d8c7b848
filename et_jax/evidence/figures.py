"""Small pictures for the documentation: matplotlib (an extra) without a screen, saved with few colours."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from et_jax.io.files import replace_file
from scripts.measuring.results import REPOSITORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = REPOSITORY / "docs/figures"


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: "Figure", path: Path) -> int:
    """Write `figure` to `path` as a PNG of 64 colours, and return its bytes."""
    from PIL import Image

    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot().close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    replace_file(path, small.getvalue())
    return len(small.getvalue())
