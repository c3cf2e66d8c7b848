"""Scores of the texts of a file: a table line for each, JSON, and a plot of entropy and loss by position."""

import itertools
import json
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
    """Return the texts of a file: the field "text" of each line of a .jsonl file, else the entire file as one.

    Raises UsageError for a line without such a field.
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


def score_texts(model: "Model", texts: Sequence[str], window: int) -> Iterator[Score]:
    """Yield the score of each text, which is read in windows of at most `window` tokens.

    A window begins with the last token of the previous one, so that every token but the first is scored once.
    """
    for text in texts:
        ids = model.tokenizer.encode(text)
        starts = range(0, max(1, len(ids) - 1), window - 1)
        first, *later = model.score([tuple(ids[at : at + window]) for at in starts])
        names = ("log_probs", "entropy", "varentropy", "greedy")
        joined = {name: [getattr(first, name), *(getattr(one, name)[1:] for one in later)] for name in names}
        arrays = {name: np.concatenate(parts) for name, parts in joined.items()}
        yield Score(token_ids=tuple(ids), num_bytes=len(text.encode()), **arrays)


def figures(score: Score) -> dict[str, Any]:
    """Return a score for JSON; lists have a value for each scored token."""
    known, count = ~np.isnan(score.log_probs), score.num_scored
    return {
        "tokens": count,
        "nats_per_token": -score.log_prob / count if count else None,
        "perplexity": score.perplexity if count else None,
        "bits_per_byte": score.bits_per_byte,
        "mean_entropy": float(score.entropy[known].mean()) if count else None,
        "token_ids": np.asarray(score.token_ids)[known].tolist(),
        **{name: getattr(score, name)[known].tolist() for name in ("log_probs", "entropy", "varentropy")},
    }


def line(number: int, found: dict[str, Any]) -> str:
    """Return a line of the table for a text."""
    if not found["tokens"]:
        return f"{number:>6}{0:>9}  a single token: nothing comes before it"
    shown = "".join(f"{found[name]:>12.4f}" for name in ("nats_per_token", "mean_entropy", "bits_per_byte"))
    return f"{number:>6}{found['tokens']:>9}{shown}{found['perplexity']:>12.3f}"


HEADER = f"{'text':>6}{'tokens':>9}{'nats/token':>12}{'entropy':>12}{'bits/byte':>12}{'perplexity':>12}"


def plot(each: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the mean entropy and the mean loss of texts by position. Raises UsageError if it cannot be written."""
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
