"""What the arguments of scripts may be: checked as they are read, before a model is loaded."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.files import check_writable
from et_jax.tasks.generators import TASKS
from scripts.measuring.results import RESULTS

_MOST = 2**31 - 1


def count(least: int = 1) -> Callable[[str], int]:
    """Return a `type` for argparse: a whole number from `least` on, in 32 bits."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {_MOST}")
        return value

    return number


def folder(text: str) -> Path:
    """Return a folder that is there. A `type` for argparse."""
    if not text or not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one that is there")
    return Path(text)


def checkout(text: str) -> Path:
    """Return a folder that holds a version of the package. A `type` for argparse."""
    path = folder(text)
    if not (path / "et_jax/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} holds no et_jax; name a checkout of it")
    return path


def output(text: str) -> Path:
    """Return where figures go, a file that can be written; its folder is made. A `type` for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; name a file")
    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({reason}); choose another file.") from error
    try:
        check_writable(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


DEPTHS = 5  # in a text, at which questions are asked
COMMON: dict[str, dict[str, Any]] = {
    "model": {"default": "bundled"},
    "text": {"type": Path, "required": True, "help": "an archive of works, or a file of stories"},
    "case": {"nargs": 2, "action": "append", "required": True, "metavar": ("MODEL", "TEXT")},
    "rows": {"type": count(), "default": 40, "help": "rows of full context (default 40)"},
    "samples": {"type": count(), "default": 8, "help": f"questions at each of {DEPTHS} depths (default 8)"},
    "segment": {"type": count(), "default": 64, "help": "tokens of a segment (default 64)"},
    "seed": {"type": count(0), "default": 0},
    "add": {"action": "store_true", "help": "keep the other cases of the output file"},
}


def parser(description: str | None, *common: str, results: str | None = None) -> argparse.ArgumentParser:
    """Return a script's parser, with these arguments of `COMMON`, and `--output` where it has a file of results."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in common:
        made.add_argument(f"--{name}", **COMMON[name])
    if results is not None:
        made.add_argument("--output", type=output, default=RESULTS / results)
    return made


def add_quality(parser: argparse.ArgumentParser) -> None:
    """Add what scripts ask that compare what a model still knows: rows of text, and the questions of tasks."""
    size = count()
    parser.add_argument("--length", type=size, default=512, help="tokens of a row of text (default 512)")
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="repeatable (default: all)")
    parser.add_argument("--task-length", type=size, default=512, help="tokens of a question (default 512)")
    parser.add_argument("--num-pages", type=size, default=2000, help="enough to keep the prompts of a task")


@contextlib.contextmanager
def refusals(script: str) -> Iterator[None]:
    """End `script` with the sentence of a UsageError."""
    try:
        yield
    except UsageError as error:
        sys.exit(f"{script}: {error}")
