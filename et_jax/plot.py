"""A completion as a picture: the text, coloured by its entropy, over what the control did for each token."""

from pathlib import Path

import numpy as np

from et_jax.requests import Completion

_TEXT_ROWS = 14  # lines of text that fit above the curves
_LINE_WIDTH = 118  # characters of a line


def plot_trace(completion: Completion, path: Path) -> None:
    """Draw `completion` to `path`; the format follows the suffix.

    From the top: the text, each token on a shade of its entropy; entropy and surprisal (nats) with
    temperature; the share of blocks read; entropic time (nats) against cost (MB moved).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = completion.trace
    token = np.arange(1, len(rows) + 1)
    entropy = np.array([row.entropy for row in rows])
    figure, axes = plt.subplots(
        4, 1, figsize=(12, 11), height_ratios=[2.6, 2.2, 1.1, 2.2], layout="constrained"
    )
    colours, scale = plt.get_cmap("YlOrRd"), plt.Normalize(0.0, max(float(entropy.max(initial=0.0)), 1.0))
    _text(axes[0], completion, colours, scale)
    figure.colorbar(
        plt.cm.ScalarMappable(scale, colours), ax=axes[0], label="entropy (nats)", fraction=0.02, pad=0.01
    )

    axes[1].plot(token, entropy, color="tab:red", label="entropy")
    axes[1].plot(token, [row.surprisal for row in rows], ".", color="tab:grey", markersize=4, label="surprisal")
    axes[1].set(ylabel="nats", xlabel="token", xlim=(0.5, len(rows) + 0.5), ylim=(0, None))
    warm = axes[1].twinx()
    warm.plot(token, [row.temperature for row in rows], color="tab:blue", label="temperature")
    warm.set(ylabel="temperature", ylim=(0, None))
    handles = [*axes[1].get_lines(), *warm.get_lines()]
    axes[1].legend(handles=handles, loc="upper right", ncols=3, frameon=False)

    axes[2].fill_between(token, [row.blocks_read / row.blocks_held for row in rows], color="tab:green", alpha=0.4, step="mid")
    axes[2].set(ylabel="share of\nblocks read", xlabel="token", xlim=(0.5, len(rows) + 0.5), ylim=(0, 1.05))

    moved = np.cumsum([row.cost for row in rows]) / 1e6
    axes[3].plot(moved, [row.entropic_time for row in rows], color="tab:purple")
    axes[3].set(ylabel="entropic time (nats)", xlabel="cost (MB moved)", xlim=(0, None), ylim=(0, None))
    for axis in axes[1:]:
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _text(axis, completion: Completion, colours, scale) -> None:
    """Write the tokens line by line in a fixed-width face, each on its colour; a long text ends in an ellipsis."""
    axis.set(xlim=(0, _LINE_WIDTH), ylim=(_TEXT_ROWS, 0))
    axis.axis("off")
    column = line = 0
    for row in completion.trace:
        for piece in row.text.replace("\r", "").replace("\n", "⏎\n").splitlines(keepends=True):
            shown = piece.rstrip("\n")
            if column + len(shown) > _LINE_WIDTH:
                column, line = 0, line + 1
            if line >= _TEXT_ROWS:
                axis.text(_LINE_WIDTH, _TEXT_ROWS, "…", ha="right", va="bottom")
                return
            axis.add_patch(
                _box(column, line, len(shown), colours(scale(row.entropy)))
            )
            axis.text(column, line + 0.72, shown.replace("$", r"\$"), family="monospace", fontsize=8.4, va="baseline")
            column += len(shown)
            if piece.endswith("\n"):
                column, line = 0, line + 1


def _box(column: int, line: int, width: int, colour):
    from matplotlib.patches import Rectangle

    return Rectangle((column, line + 0.08), width, 0.9, color=colour, alpha=0.75, linewidth=0)
