"""What the arguments of scripts may be: checked as they are read, before a model is loaded."""

import argparse
from collections.abc import Callable

_MOST = 2**31 - 1


def count(least: int = 1) -> Callable[[str], int]:
    """Return a `type` for argparse: a whole number from `least` on, in 32 bits."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {_MOST}")
        return value

    return number


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a script's parser, whose help is its docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
