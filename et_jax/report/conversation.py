"""A chat on a terminal: the turns so far, slash commands, tokens in the colour of their entropy."""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from et_jax.cli.signals import Signals
from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.io.terminal import takes_escapes
from et_jax.serve.completions import Completion, TokenEvent
from et_jax.serve.model import Model
from et_jax.serve.requests import SamplingParams

_EDGES = (0.5, 1.0, 2.0, 4.0)  # nats: the bounds between colours
_COLOURS = ("", "\x1b[38;5;185m", "\x1b[38;5;179m", "\x1b[38;5;173m", "\x1b[38;5;167m")
_PLAIN = "\x1b[0m"
_HELP = """/reset            forget the turns so far
/system TEXT      restart with this system message
/set NAME VALUE   change a sampling setting: /set temperature 0.7
/trace            show entropy, varentropy and surprisal of the last answer's tokens
/save FILE        write the turns as JSON
/help             show this
/quit, Ctrl-D     end; Ctrl-C stops an answer or drops the line, and keeps the chat"""


def coloured(event: TokenEvent, escapes: bool) -> str:
    """Return the text of a token, in the colour of its entropy if the terminal supports `escapes`."""
    if event.trace is None or not escapes:
        return event.text
    step = sum(event.trace.entropy >= edge for edge in _EDGES)
    return f"{_COLOURS[step]}{event.text}{_PLAIN if step else ''}"


class Conversation:
    """Turns of a user and a model, formatted by its chat template.

    Each answer is a continuation of all turns so far, whose pages are cached prefix pages. Raises UsageError for a
    model without a template.
    """

    def __init__(
        self, model: Model, params: SamplingParams, system_prompt: str | None, *, allow_special_tokens: bool = False
    ) -> None:
        self.model, self.params, self.system_prompt = model, params, system_prompt
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        self._special = allow_special_tokens
        model.tokenizer.render([{"role": "user", "content": "?"}], system_prompt)

    def answer(self, text: str, show: Callable[[TokenEvent], None], cancelled: Callable[[], bool]) -> None:
        """Add a turn and its answer, which `show` receives token by token.

        A `cancelled` answer is kept up to that point. Raises UsageError, and adds nothing, if the turns exceed the
        model's length, or the answer fails.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.model.tokenizer.chat(asked, self.system_prompt, allow_special_tokens=self._special)
        with contextlib.closing(self.model.stream([ids], self.params, cancelled=cancelled)) as events:
            for event in events:
                show(event)
                self.last = event.completion or self.last
        assert self.last is not None
        self.messages = [*asked, {"role": "assistant", "content": self.last.checked().text}]

    def command(self, line: str) -> str:
        """Run a line that begins with a slash, and return its reply. Raises UsageError for an invalid command."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset" and not rest:
            self.messages = []
            return "The turns so far are forgotten."
        if name == "/system" and rest:
            self.model.tokenizer.render([{"role": "user", "content": "?"}], rest)
            self.system_prompt, self.messages = rest, []
            return "The chat restarts with this system message."
        if name == "/set" and len(words := rest.split(None, 1)) == 2:
            self.params = _changed(self.params, *words)
            return f"{words[0]} is {getattr(self.params, words[0])}."
        if name == "/trace" and not rest:
            return _traced(self.last)
        if name == "/save" and rest:
            opening = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
            turns = json.dumps([*opening, *self.messages], indent=1, ensure_ascii=False)
            try:
                replace_file(Path(rest), turns + "\n")
            except OSError as error:
                raise UsageError(f"{rest} cannot be written ({error.strerror}); name another file.") from error
            return f"{len(self.messages)} turns are in {rest}."
        if name == "/help" and not rest:
            return _HELP
        raise UsageError(f"{line} is no command; /help shows what there is.")


def converse(conversation: Conversation, signals: Signals) -> int:
    """Read turns from standard input until its end, and return the exit code."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  adds line editing and history

    if sys.stdin is None:
        raise UsageError("Standard input is closed, and a chat reads its turns from there.")
    escapes, asks = takes_escapes(sys.stdout), sys.stdin.isatty()

    def show(event: TokenEvent) -> None:
        print(coloured(event, escapes), end="", flush=True)

    if asks:
        print(f"{conversation.model.name}: /help shows the commands, Ctrl-D ends.", file=sys.stderr)
    stopped = signals.defer()
    while signals.number in (None, signal.SIGINT):
        try:
            with signals.asking():
                line = input("> " if asks else "").strip()
            signals.forget()  # a Ctrl-C between an answer and the question
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)  # drops the line typed so far
            continue
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not UTF-8 ({error.reason}); give the turns as UTF-8 text.") from error
        try:
            if line == "/quit":
                return 0
            if line.startswith("/"):
                print(conversation.command(line), file=sys.stderr)
            elif line:
                conversation.answer(line, show, stopped)
                print(flush=True)
        except UsageError as error:
            print(f"error: {error.on_command_line}", file=sys.stderr)
    return signals.code


def _changed(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """Return the settings with one of them changed, given as JSON or as text."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("n", "best_of")]
    if name not in names:
        raise UsageError(f"{name} is no setting; choose one of {', '.join(names)}.")
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        given = value
    if isinstance(given, dict):  # JSON has the tokens of a bias as texts
        given = {int(key) if key.isdecimal() and len(key) < 10 else key: bias for key, bias in given.items()}
    return dataclasses.replace(params, **{name: tuple(given) if isinstance(given, list) else given})


def _traced(last: Completion | None) -> str:
    if last is None:
        return "There is no answer yet."
    lines = [f"{'entropy':>8}{'varentropy':>12}{'surprisal':>11}  token"]
    lines += [f"{row.entropy:8.3f}{row.varentropy:12.3f}{row.surprisal:11.3f}  {row.text!r}" for row in last.trace]
    return "\n".join(lines)
