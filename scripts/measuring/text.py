"""Text to measure on, as rows of token ids: works held out from the bundled model's training, or a file of stories."""

import re
from pathlib import Path

import numpy as np
from jaxtyping import Int

from et_jax.io.texts import read_text
from et_jax.serve.engine import Model
from et_jax.serve.loading import calibrating
from et_jax.training import corpus


def texts(path: Path) -> list[str]:
    """Return the held-out works of a tar archive of works, or the stories of a file, a line break between two.

    Within a story paragraphs are parted by an empty line. Raises UsageError where the file cannot be read.
    """
    if ".tar" in path.suffixes:
        works = corpus.read_works(path)
        return [works[name] for name in corpus.split(works)[1]]
    return [story for story in re.split(r"(?<!\n)\n(?!\n)", read_text(path, "The text")) if story]


def rows(model: Model, path: Path, count: int, length: int) -> Int[np.ndarray, "r t"]:
    """Return `count` rows of `length` tokens, evenly spaced over the texts of a file end to end."""
    return calibrating.rows(model.tokenizer, texts(path), str(path), count, length)
