"""A command: arguments in, an exit code and at most one sentence out.

Nothing here imports JAX.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

from et_jax.cli.signals import Signals
from et_jax.cli.streams import STANDARD_OUTPUT, standard_streams
from et_jax.errors import UsageError

FAILED, USAGE = 1, 2  # exit codes; that of a signal is 128 plus its number, the shells' convention
READER_GONE = 141  # the exit code of SIGPIPE
_NO_THREAD = "can't start new thread"  # Python's message when processes or memory are limited
_THREADS = "The system starts no more threads; end other programs, or raise `ulimit -u` or `ulimit -v`."
_SHORTAGE = "No memory is left for this; free some, or ask for less at once. What was written so far is kept."


def run(
    parser: Callable[[], argparse.ArgumentParser],
    command: Callable[[argparse.Namespace, Signals], int],
    arguments: list[str] | None,
    *,
    texts: Collection[str],
) -> int:
    """Run a command and return its exit code; an error is reported in one sentence on standard error.

    `texts` names the arguments that are texts, not files or numbers.
    """
    try:
        return _run(parser, command, arguments, texts)
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        print(f"error: {_THREADS}", file=sys.stderr)
        return FAILED


def _run(
    parser: Callable[[], argparse.ArgumentParser],
    command: Callable[[argparse.Namespace, Signals], int],
    arguments: list[str] | None,
    texts: Collection[str],
) -> int:
    with standard_streams(), Signals() as signals:
        flags = parser()
        flags.error = _refuse  # argparse prints all flags before its message
        try:
            args = flags.parse_args(arguments)
            _check_given(args, texts)
            code = command(args, signals)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except UsageError as error:
            print(f"error: {error.on_command_line}", file=sys.stderr)
            return USAGE
        except ValueError as error:
            if "jax" in sys.modules:
                raise
            print(f"error: JAX cannot be imported ({error}); correct or unset that variable.", file=sys.stderr)
            return USAGE
        except KeyboardInterrupt:  # in another thread than the main one, or from a library
            print(f"\n{signals.said}", file=sys.stderr)
            return 128 + signal.SIGINT
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error) or _NO_THREAD in str(error):
                raise
        except OSError as error:
            if _is_reader_gone(error):
                return READER_GONE
            print(f"error: {sentence(error)}; what was printed so far is kept.", file=sys.stderr)
            return FAILED
        # Printed after the frames of the failed call have released their memory.
        print(f"error: {_SHORTAGE}", file=sys.stderr)
        return FAILED


def is_shortage(error: BaseException) -> bool:
    """Return whether memory, or a thread, was refused: by Python, or in the messages of JAX's runtime."""
    words = "RESOURCE_EXHAUSTED", "Out of memory", _NO_THREAD
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _is_reader_gone(error: OSError) -> bool:
    return isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT


def sentence(error: OSError) -> str:
    """Return which file failed, and why."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def succeeded(write: Callable[[], None]) -> bool:
    """Write a secondary file, and return whether that worked; an error is printed."""
    try:
        write()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    except OSError as error:
        if _is_reader_gone(error):
            raise
        print(f"error: {sentence(error)}; what was printed is complete.", file=sys.stderr)
        return False
    return True


def _refuse(message: str) -> NoReturn:
    """Raise UsageError for a message of argparse."""
    number = re.fullmatch(r"argument ([^:/]+)[^:]*: invalid (int|float) value: (.*)", message)
    if number is not None:
        wanted = "a whole number" if number[2] == "int" else "a number"
        raise UsageError(f"{number[1]} is {number[3]}; give {wanted}.")
    raise UsageError(f"{message}; --help lists the flags.")


def _check_given(args: argparse.Namespace, texts: Collection[str]) -> None:
    """Decode every text as UTF-8, whatever the locale; raise UsageError for other encodings and for empty names."""
    for name, value in vars(args).items():
        if name not in texts and isinstance(value, str) and (not value or "\0" in value):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is {value!r}, which names nothing; give it a name, or leave it out.")
        if isinstance(value, list) and name in texts:
            setattr(args, name, [_decoded(name, one) for one in value])
        elif isinstance(value, str) and name in texts:
            setattr(args, name, _decoded(name, value))
        elif any(_is_mangled(str(one)) for one in (value if isinstance(value, list) else [value])):
            raise UsageError(
                f"--{name.replace('_', '-')} is {str(value)!r}, which this locale's {sys.getfilesystemencoding()} "
                "cannot spell; choose another name, or a locale such as C.UTF-8."
            )


def _is_mangled(value: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in value)


def _decoded(name: str, value: str) -> str:
    if not _is_mangled(value):
        return value
    try:
        return os.fsencode(value).decode()
    except UnicodeError as error:
        raise UsageError(f"--{name.replace('_', '-')} is not UTF-8; give it as UTF-8 text.") from error
