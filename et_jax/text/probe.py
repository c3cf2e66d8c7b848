"""The program that tests a tokenizer's regular expressions, in a separate process.

It reads from standard input an object with `memory`, then one with `patterns`. It writes `{}`, then
`{"slow": ...}`, the first pattern that is too slow, or null. It imports nothing of this package.
"""

import json
import struct
import sys
import time
from typing import Any

LENGTH = struct.Struct("<Q")
RUN = 20_000  # characters: linear time is milliseconds, quadratic time seconds
CPU_SECONDS = 0.5  # for one text; a split in linear time takes a hundredth of it
CLASSES = ["a", "A", "1", "_", "-", "'", '"', ".", "!", "<", "(", "é", "中", "́", "🐈", "\u200d"]
SPACES = " \n\r\t\u00a0"


def texts(pattern: str) -> list[str]:
    """Return texts that provoke backtracking: long runs, followed by a character that does not match."""
    letters = sorted({letter for letter in pattern if letter.isprintable() and letter.isascii()})
    tail = "\0" + "".join(letter * 9 for letter in letters) + pattern
    units = [*dict.fromkeys([*CLASSES, *SPACES, *letters])]
    pairs = ["a ", " a", "aA", "a1", "\n ", "ab", "'s", "a.", "a\0"]
    return [unit * (RUN // len(unit)) + tail for unit in units + pairs]


def slow(patterns: list[str]) -> str | None:
    """Return the first pattern that is too slow on some text."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    for pattern in patterns:
        split = Split(Regex(pattern), "removed")
        for text in texts(pattern):
            before = time.process_time()
            try:
                split.pre_tokenize_str(text)
            except BaseException:  # the library panics with other classes than Exception
                return pattern
            if time.process_time() - before > CPU_SECONDS:
                return pattern
    return None


def read() -> dict[str, Any]:
    """Return the next object on standard input."""
    return json.loads(sys.stdin.buffer.read(LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))[0]))


def write(values: dict[str, Any]) -> None:
    """Write an object to standard output."""
    data = json.dumps(values).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    read()
    write({})
    write({"slow": slow(read()["patterns"])})
