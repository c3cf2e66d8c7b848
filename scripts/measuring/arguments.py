"""What the arguments of scripts may be: checked as they are read, before a model is loaded."""

import argparse
from collections.abc import Callable
from pathlib import Path

from et_jax.errors import UsageError
from et_jax.io.files import check_writable

_MOST = 2**31 - 1


def count(least: int = 1) -> Callable[[str], int]:
    """Return a `type` for argparse: a whole number from `least` on, in 32 bits."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {_MOST}")
        return value

    return number


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a script's parser, whose help is its docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
