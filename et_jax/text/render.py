"""The program that renders chat templates, in a separate process; it imports nothing of this package.

It reads from standard input an object with `template`, `special_tokens` and `memory`, then objects with
`messages`, `seconds` and `most`. It writes for each `{}`, then `{"text": ...}` or `{"error": ...}`. A template
is untrusted code: it runs in a sandbox and can change nothing, with limited memory and time.
"""

import datetime
import json
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<Q")
SHOWN = 300  # characters of an error


class Generation(Extension):
    """The tag that marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own spelling)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """Refuse the messages, as called by templates."""
    raise jinja2.TemplateError(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON in the format of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def compiled(source: str) -> jinja2.Template:
    """Return the template, compiled but not run."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)


def rendered(template: jinja2.Template, variables: dict[str, Any], most: int) -> str:
    """Return the text, of at most `most` characters. Raises ValueError beyond, and for half a character."""
    pieces, size = [], 0
    for piece in template.generate(**variables, tools=None, documents=None, add_generation_prompt=True):
        size += len(piece)
        if size > most:
            raise ValueError(f"it writes more than {most} characters")
        pieces.append(piece)
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it writes half of a surrogate pair") from error
    return text


def limit(memory: int) -> None:
    """Bound the memory of this process, if the system can."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (("RLIMIT_AS", memory), ("RLIMIT_CORE", 0)):
        if hasattr(resource, kind):
            resource.setrlimit(getattr(resource, kind), (most, most))


def alarm(seconds: float) -> None:
    """End this process if it is still running then, even without a parent that would stop it; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def answers(question: Callable[[], dict[str, Any] | None], answer: Callable[[dict[str, str]], None]) -> None:
    """Answer questions until the input ends."""
    opening = question()
    if opening is None:
        return
    limit(opening["memory"])
    answer({})
    template = None
    while (asked := question()) is not None:
        alarm(asked["seconds"] + 1)
        try:
            template = template or compiled(opening["template"])
            variables = opening["special_tokens"] | {"messages": asked["messages"]}
            said = {"text": rendered(template, variables, asked["most"])}
        except MemoryError:
            said = {"error": "it needs too much memory"}
        except RecursionError:
            said = {"error": "it calls itself too deep"}
        except Exception as error:  # untrusted code raises anything
            reason = str(error)[:SHOWN].encode(errors="backslashreplace").decode()
            said = {"error": " ".join(reason.split())[:SHOWN] or type(error).__name__}
        answer(said)
        alarm(0)


def read() -> dict[str, Any] | None:
    """Return the next object on standard input."""
    head = sys.stdin.buffer.read(LENGTH.size)
    return json.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def write(values: dict[str, str]) -> None:
    """Write an object to standard output."""
    data = json.dumps(values, ensure_ascii=False).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    answers(read, write)
