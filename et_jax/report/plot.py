"""A completion as a picture: the text, coloured by its entropy, above the control's figures of each token."""

import importlib.util
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_picture
from et_jax.io.known import known
from et_jax.serve.completions import Completion, checked_completion

_TEXT_LINES = 24  # the most lines of text above the curves
_LINE_WIDTH = 118  # characters per line


def check_picture(path: str) -> None:
    """Check before any work that the picture of --plot can be drawn, and written to `path`.

    Raises UsageError.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it with: pip install 'et_jax[plot]'.")
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot draws .png, .svg or .pdf; {path} is none of them.")
    check_writable(path)


def plot_trace(completion: Completion, path: Path) -> None:
    """Draw `completion` to `path`; the format follows the suffix. Raises UsageError if it cannot be written.

    From the top: the text, each token on a shade of its entropy; entropy and surprisal (nats) with
    temperature; the share of blocks read, with the mean and the least attention entropy of the query heads
    if blocks were selected; entropic time (nats) against cost (MB moved). Unknown values leave a gap.

    Raises UsageError for an invalid completion, see `checked_completion`.
    """
    completion = checked_completion(completion)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    rows = completion.trace
    token = np.arange(1, len(rows) + 1)
    entropy = np.array([row.entropy for row in rows])
    boxes = _layout([row.text for row in rows])
    lines = max((line for _, line, _, _ in boxes), default=0) + 1
    figure, axes = plt.subplots(
        4, 1, figsize=(12, 8 + 0.22 * lines), height_ratios=[0.22 * lines, 3.2, 1.2, 2.6], layout="constrained"
    )
    colours, scale = plt.get_cmap("YlOrRd"), Normalize(0.0, max([1.0, *known(entropy)]))
    axes[0].set(xlim=(0, _LINE_WIDTH), ylim=(lines, 0))
    axes[0].axis("off")
    for column, line, text, i in boxes:
        shade = "none" if math.isnan(entropy[i]) else colours(scale(entropy[i]), alpha=0.75)
        axes[0].add_patch(Rectangle((column, line + 0.08), len(text), 0.9, color=shade, linewidth=0))
        shown = text.replace("$", r"\$")
        axes[0].text(column, line + 0.72, shown, family="monospace", fontsize=8.4, va="baseline")
    shades = plt.cm.ScalarMappable(scale, colours)
    figure.colorbar(shades, ax=axes[1], label="entropy (nats), as above", fraction=0.02, pad=0.06)

    axes[1].plot(token, entropy, color="tab:red", label="entropy")
    axes[1].plot(token, [row.surprisal for row in rows], ".", color="tab:grey", markersize=4, label="surprisal")
    axes[1].set(ylabel="nats", xlim=(0.5, max(len(rows), 1) + 0.5), ylim=(0, None))
    warm = axes[1].twinx()
    warm.plot(token, [row.temperature for row in rows], color="tab:blue", label="temperature")
    warm.set(ylabel="temperature", ylim=(0, 1.1 * max(known(row.temperature for row in rows), default=0.0) + 0.1))
    handles = [*axes[1].get_lines(), *warm.get_lines()]
    axes[1].legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)

    share = [row.blocks_read / row.blocks_held for row in rows]
    axes[2].fill_between(token, share, color="tab:green", alpha=0.4, step="mid")
    measured = [(i, row) for i, row in zip(token, rows, strict=True) if row.attention_entropy is not None]
    if measured:
        places = [i for i, _ in measured]
        axes[2].plot(
            places, [row.attention_entropy for _, row in measured], color="tab:brown", label="attention entropy"
        )
        least = [row.least_attention_entropy for _, row in measured]
        axes[2].plot(places, least, ":", color="tab:brown", label="the least of a head")
        axes[2].legend(loc="lower right", ncols=2, frameon=False)
    axes[2].set(ylabel="share of\nblocks read", xlabel="token", xlim=(0.5, max(len(rows), 1) + 0.5), ylim=(0, 1.05))

    moved = np.cumsum([row.cost for row in rows]) / 1e6
    axes[3].plot(moved, [row.entropic_time for row in rows], color="tab:purple")
    axes[3].set(ylabel="entropic time (nats)", xlabel="cost (MB moved)", xlim=(0, None), ylim=(0, None))
    for axis in axes[1:]:
        axis.grid(alpha=0.25)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box replaces it
        replace_picture(path, figure, dpi=110)
    plt.close(figure)


def _layout(texts: Sequence[str]) -> list[tuple[int, int, str, int]]:
    """Return (column, line, text, token) for every piece of text; a long text ends in an ellipsis."""
    boxes: list[tuple[int, int, str, int]] = []
    column = line = 0
    for i, text in enumerate(texts):
        for piece in text.replace("\n", "⏎\n").splitlines(keepends=True):
            shown = "".join(map(_shown, piece.rstrip("\r\n")))
            if column + len(shown) > _LINE_WIDTH:
                column, line = 0, line + 1
            if line >= _TEXT_LINES:
                return [*boxes, (0, line, "…", i)]
            boxes.append((column, line, shown, i))
            column += len(shown)
            if piece.endswith(("\r", "\n")):
                column, line = 0, line + 1
    return boxes


def _shown(letter: str) -> str:
    """Return the shown form of a character: control characters are invisible, and invalid in an SVG."""
    return letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
