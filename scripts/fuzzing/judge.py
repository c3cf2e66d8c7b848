"""What became of a case: worked, refused in one sentence, or failed, and how."""

import dataclasses
import itertools
import traceback
import unicodedata
from collections.abc import Callable
from typing import Any

from fuzzing.cases import REFUSED, Fault

from et_jax.errors import UsageError

LONGEST = 600  # characters of a refusal
NOISE = 2000  # bytes of output besides it: more is pages
_DETAIL = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a case, and what there is to say about it."""

    outcome: str
    detail: str = ""


def judge(run: Callable[[Any], str], case: Any) -> Verdict:
    """Run a case and return its verdict."""
    try:
        return Verdict(outcome=run(case))
    except UsageError as error:
        return refusal(str(error))
    except Fault as fault:
        return Verdict(outcome=fault.outcome, detail=shortened(str(fault)))
    except BaseException as error:  # a panic of a library is no Exception
        return Verdict(outcome="traceback", detail=shortened(f"{_where(error)}: {type(error).__name__}: {error}"))


def _where(error: BaseException) -> str:
    """Return where an exception was raised, and where the package last had its hands on it."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename.rpartition("/site-packages/")[2] for frame in frames]
    judged = ["/et_jax/" in file and "/et_jax/evidence/" not in file for file in files]
    package = list(itertools.compress(frames, judged))
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in (*package[-1:], frames[-1])
    ]
    return " < ".join(reversed(dict.fromkeys(places)))


def refusal(message: str) -> Verdict:
    """Return whether a refusal is one sentence that can be printed."""
    problem = not_a_sentence(message)
    if problem is None:
        return Verdict(outcome=REFUSED, detail=shortened(message))
    return Verdict(outcome="sentence", detail=shortened(f"{problem}: {message}"))


def not_a_sentence(message: str) -> str | None:
    """Return why a message is no single sentence, None where it is one."""
    if not message.endswith("."):
        return "does not end with a full stop"
    if "\n" in message or "\r" in message:
        return "has more than one line"
    if len(message) > LONGEST:
        return f"has {len(message)} characters"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in message):  # they harm a terminal, or the print
        return "cannot be printed"
    return None


def shortened(text: str) -> str:
    """Return a detail for the report, of one line, that every file can hold."""
    line = " ".join(text[:4000].encode("ascii", "backslashreplace").decode().split())
    return line if len(line) <= _DETAIL else f"{line[: _DETAIL // 2]} ... {line[-_DETAIL // 2 :]}"
