"""Texts of a file under a model: what each is worth in nats and bits, and how entropy and loss go by position."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.io.files import replace_picture
from et_jax.io.texts import read_text
from et_jax.serve.scoring import Score

if TYPE_CHECKING:
    from et_jax.serve.model import Model

_POINTS = 128  # of a plot


def texts_of(path: Path) -> list[str]:
    """Return the texts of a file: the field "text" of each line of a .jsonl file, else all of it as one.

    Raises UsageError for a line that has no such field.
    """
    content = read_text(path, "The input")
    if path.suffix != ".jsonl":
        return [content]
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str) or not text:
            raise UsageError(f'Line {number} of {path} has no text; write lines like {{"text": "It was"}}.')
        found.append(text)
    return found


def score_texts(model: "Model", texts: Sequence[str], window: int) -> Iterator[list[Score]]:
    """Yield the scores of each text, window by window of at most `window` tokens.

    A window begins with the last token of the one before it, so that every token but the first is scored once.
    """
    for text in texts:
        ids = model.tokenizer.encode(text)
        step = window - 1
        yield model.score([tuple(ids[at : at + window]) for at in range(0, max(1, len(ids) - 1), step)])


def figures(text: str, windows: Sequence[Score]) -> dict[str, Any]:
    """Return what the windows of a text come to; arrays have a value for each token that is scored."""
    parts = [np.stack([one.log_probs, one.entropy, one.varentropy]) for one in windows]
    ids = [token for one in windows for token in one.token_ids]
    table = np.concatenate(parts, axis=1)
    known = np.isfinite(table[0])
    log_probs, entropies, varentropies = table[:, known]
    total, count = float(log_probs.sum()), int(known.sum())
    return {
        "tokens": count,
        "nats_per_token": -total / count if count else None,
        "perplexity": math.exp(-total / count) if count else None,
        "bits_per_byte": -total / math.log(2) / len(text.encode()),
        "mean_entropy": float(entropies.mean()) if count else None,
        "token_ids": np.asarray(ids)[known].tolist(),
        "log_probs": log_probs.tolist(),
        "entropy": entropies.tolist(),
        "varentropy": varentropies.tolist(),
    }


def line(number: int, found: dict[str, Any]) -> str:
    """Return a line of the table for a text."""
    if not found["tokens"]:
        return f"{number:>6}{0:>9}  one token alone: nothing comes before it"
    shown = "".join(f"{found[name]:>12.4f}" for name in ("nats_per_token", "mean_entropy", "bits_per_byte"))
    return f"{number:>6}{found['tokens']:>9}{shown}{found['perplexity']:>12.3f}"


HEADER = f"{'text':>6}{'tokens':>9}{'nats/token':>12}{'entropy':>12}{'bits/byte':>12}{'perplexity':>12}"


def plot(each: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the mean entropy and the mean loss of texts by position. Raises UsageError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max((one["tokens"] for one in each), default=0)
    edges = np.unique(np.linspace(0, longest, min(longest, _POINTS) + 1).astype(int))
    figure, axis = plt.subplots(figsize=(8, 4), layout="tight")
    for name, label, sign in (("entropy", "entropy", 1), ("log_probs", "loss", -1)):
        rows = np.full((len(each), longest), np.nan)
        for row, one in zip(rows, each, strict=True):
            row[: one["tokens"]] = sign * np.asarray(one[name])
        means = [np.nanmean(rows[:, low:high]) for low, high in itertools.pairwise(edges)]
        axis.plot(edges[:-1], means, label=label)
    axis.set(xlabel="position (tokens)", ylabel="nats", title=f"{len(each)} texts")
    axis.legend()
    replace_picture(path, figure)
    plt.close(figure)
