"""The output of the command line for one prompt: progress, streamed text, trace rows, a summary."""

import json
import sys
import time
from typing import Any

from et_jax.io.terminal import fitted, takes_escapes
from et_jax.report.trace import TraceWriter
from et_jax.serve.completions import Completion, TokenEvent
from et_jax.serve.requests import SamplingParams
from et_jax.serve.totals import Totals


class Status:
    """One line on standard error, rewritten as work progresses; on a terminal it is cleared at the end.

    On a terminal the cursor stays at its start, so that other output goes to its own line.
    """

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, what: str) -> None:
        """Show the work in progress, or a sentence on finished work."""
        line = what if what.endswith(".") else f"{what} ..."
        if takes_escapes(sys.stderr):
            print(f"\r\x1b[K{fitted(line, sys.stderr)}\r", end="", file=sys.stderr, flush=True)
            self._shown = True
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


class Report:
    """Shows streamed text, trace rows, and the summary at the end.

    With `as_json` one object per continuation is printed at the end, else the text: streamed with
    one continuation and `stream`, at the end otherwise. `trace` receives every event; if it
    fails, the text continues without it.
    """

    def __init__(
        self, status: Status, trace: TraceWriter | None, params: SamplingParams, *, as_json: bool, stream: bool
    ) -> None:
        self._status, self._trace, self._as_json = status, trace, as_json
        self._n, self._sampled = params.n, params.sampled
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._tokens = 0
        self._streams = stream and not as_json and self._n == 1
        self.completions: list[Completion] = []

    def take(self, event: TokenEvent) -> None:
        """Show one token, or the end of a continuation."""
        if event.trace is not None:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._tokens += 1
        if self._trace is not None:
            self._trace.take(event)
        if self._streams:
            self._status.clear()
            print(event.text, end="", flush=True)
        if event.completion is not None:
            self.completions.append(event.completion)

    def close(self) -> None:
        """Print what was not streamed, then the summary."""
        self._status.clear()
        self.completions.sort(key=lambda completion: completion.index)
        for completion in self.completions:
            if self._as_json:
                print(_json(completion.to_dict()))
            elif not self._streams:
                print(f"--- {completion.index + 1} of {self._n}\n" * (self._n > 1) + completion.text)
        if self._streams:
            print()
        sys.stdout.flush()
        print(self._summary(), file=sys.stderr)

    def check_trace(self) -> None:
        """Raise the OSError that ended the trace, if there was one."""
        if self._trace is not None:
            self._trace.check()

    def _summary(self) -> str:
        if not self._tokens:
            return "no token produced"
        wait = self._first - self._began
        rate = (self._tokens - 1) / (self._last - self._first) if self._tokens > 1 else 0.0
        speed = f"{rate:.1f} tokens/s, first after {wait:.2f} s"
        if self._sampled > self._n:  # they arrive together
            speed = f"the likeliest {self._n} of {self._sampled} after {wait:.2f} s"
        reasons = ", ".join(sorted({completion.finish_reason for completion in self.completions}))
        return f"[{self._tokens} tokens ({reasons}), {speed}; {Totals.of(self.completions).described()}]"


def _json(value: dict[str, Any]) -> str:
    """Return a value as a line of JSON, with escapes for characters that standard output cannot encode."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(value)
    return line
