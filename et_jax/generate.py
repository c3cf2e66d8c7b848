"""The command line for one prompt: `python -m et_jax.generate --prompt "It was"`.

The text goes to standard output as it comes; everything else goes to standard error.
"""

import argparse
import dataclasses
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from et_jax.engine import Model
    from et_jax.requests import Completion, SamplingParams, TokenEvent
    from et_jax.state import Controller

FAILED, USAGE, INTERRUPTED = 1, 2, 130  # exit codes; the last is the shell's for Ctrl-C


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m et_jax.generate",
        description="Continue a prompt, with the entropy of every token measured.",
        allow_abbrev=False,
    )
    p.add_argument("--model", default="bundled", help="bundled (default), a Hugging Face folder, or a hub name")
    p.add_argument("--prompt", "-p", required=True, help="the text to continue; - reads standard input")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the model's chat template")
    p.add_argument("--system-prompt", help="the system message, with --chat")
    p.add_argument("--max-tokens", type=int, default=256, help="tokens to produce at most (default 256)")
    sampling = p.add_argument_group("sampling")
    sampling.add_argument("--temperature", "--temp", type=float, default=1.0, help="0 is greedy (default 1)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0, off)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass (1, off)")
    sampling.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best (0, off)"
    )
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 shuns repeats (1, off)")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, help="subtracted from used tokens (0, off)")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, help="subtracted per use (0, off)")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    sampling.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    sampling.add_argument("--n", type=int, default=1, help="continuations of the prompt (default 1)")
    control = p.add_argument_group("control")
    control.add_argument(
        "--control", default="off", help="off (default), paper, guarded or certified: which laws run the decoder"
    )
    control.add_argument("--target-entropy", type=float, metavar="NATS", help="hold the entropy here by temperature")
    control.add_argument("--tolerance", type=float, help="the most attention that may be left unread (default 0.05)")
    control.add_argument("--min-blocks", type=int, help="cache blocks always read per head (default 3)")
    control.add_argument("--window", type=int, help="recent tokens always read (default 64; paper: 0)")
    machine = p.add_argument_group("model and memory")
    machine.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    machine.add_argument("--page-size", type=int, help="tokens per cache page (16 on CPU, 64 on GPU, 128 on TPU)")
    machine.add_argument("--max-model-len", type=int, help="prompt and text together, in tokens")
    machine.add_argument("--num-pages", type=int, help="pages of the cache (default: enough for everything)")
    output = p.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object per continuation, at the end")
    output.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    output.add_argument("--verbose", action="store_true", help="say what runs where")
    output.add_argument("--trace", metavar="FILE", help="write one JSON line per token: entropy, temperature, cost ...")
    output.add_argument("--plot", metavar="FILE.png", help="draw the same as a picture")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = parser().parse_args(arguments)
    from et_jax.types import UsageError

    try:
        return _run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\ninterrupted before the first token", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; nothing can be said any more
        return FAILED
    except OSError as error:
        print(
            f"error: {error.filename or 'output'}: {error.strerror}; what was printed so far is kept.", file=sys.stderr
        )
        return FAILED


def _run(args: argparse.Namespace) -> int:
    from et_jax.types import UsageError

    if args.system_prompt is not None and not args.chat:
        raise UsageError("--system-prompt needs --chat; without a chat template there is no place for it.")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UsageError("The prompt is empty; give some text with --prompt, or on standard input with --prompt -.")
    with ExitStack() as stack:
        trace = stack.enter_context(_open(args.trace)) if args.trace else None
        if args.plot:
            _check_plot(args.plot)
        params, control = _sampling(args), _controller(args)
        progress = _Progress()
        model = _load(args, params, control, progress)
        ids = (
            [model.tokenizer.chat([{"role": "user", "content": prompt}], args.system_prompt)] if args.chat else [prompt]
        )
        report = _Report(args, trace, progress)
        with _interrupts() as interrupted:
            for event in model.stream(ids, params, cancelled=interrupted):
                report.take(event)
    report.close()
    if args.plot and report.completions:
        from et_jax.plot import plot_trace

        plot_trace(report.completions[0], Path(args.plot))
    for completion in report.completions:
        if completion.error:
            print(f"error: {completion.error}", file=sys.stderr)
            return FAILED
    return INTERRUPTED if interrupted() else 0


def _sampling(args: argparse.Namespace) -> "SamplingParams":
    from et_jax.requests import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)} & vars(args).keys()
    return SamplingParams(**{name: getattr(args, name) for name in names} | {"stop": tuple(args.stop)})


def _controller(args: argparse.Namespace) -> "Controller":
    from et_jax.presets import preset

    return preset(
        args.control,
        target_entropy=args.target_entropy,
        tolerance=args.tolerance,
        min_blocks=args.min_blocks,
        window=args.window,
    )


def _load(args: argparse.Namespace, params: "SamplingParams", control: "Controller", progress: "_Progress") -> "Model":
    from et_jax.engine import load

    model = load(
        args.model,
        dtype=args.dtype,
        page_size=args.page_size,
        max_model_len=args.max_model_len,
        num_pages=args.num_pages,
        max_num_seqs=params.n,
        control=control,
        progress=progress.tell,
    )
    if args.verbose:
        progress.clear()
        for line in model.describe():
            print(line, file=sys.stderr)
    return model


def _open(path: str) -> TextIO:
    from et_jax.types import UsageError

    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


def _check_plot(path: str) -> None:
    """Find out before any work is done that the picture can be drawn and kept."""
    from et_jax.types import UsageError

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it with: pip install 'et_jax[plot]'.")
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot draws .png, .svg or .pdf; {path} is none of them.")
    with _open(path):
        pass


@contextmanager
def _interrupts() -> Iterator:
    """Turn the first Ctrl-C into an answer (the text so far is kept); a second one ends at once."""
    seen = False

    def handler(number: int, frame: object) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


class _Progress:
    """One line on standard error, rewritten as work goes on; on a terminal only the last state stays."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._shown = False

    def tell(self, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what} ...", end="", file=sys.stderr, flush=True)
            self._shown = True
        else:
            print(f"{what} ...", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


class _Report:
    """Shows what comes: text, trace rows, and the summary at the end."""

    def __init__(self, args: argparse.Namespace, trace: TextIO | None, progress: _Progress) -> None:
        self._args, self._trace, self._progress = args, trace, progress
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._tokens = 0
        self._streams = not (args.json or args.no_stream) and args.n == 1
        self.completions: list[Completion] = []

    def take(self, event: "TokenEvent") -> None:
        if event.trace is not None:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._tokens += 1
            if self._trace is not None:
                row = {"index": event.index} | dataclasses.asdict(event.trace)
                self._trace.write(json.dumps(row, ensure_ascii=False) + "\n")
                self._trace.flush()
        if self._streams:
            self._progress.clear()
            print(event.text, end="", flush=True)
        if event.completion is not None:
            self.completions.append(event.completion)

    def close(self) -> None:
        """Print what was not streamed, then the summary."""
        self._progress.clear()
        self.completions.sort(key=lambda completion: completion.index)
        for completion in self.completions:
            if self._args.json:
                print(json.dumps(completion.to_dict(), ensure_ascii=False))
            elif not self._streams:
                print(f"--- {completion.index + 1} of {self._args.n}\n" * (self._args.n > 1) + completion.text)
        if self._streams:
            print(flush=True)
        print(self._summary(), file=sys.stderr)

    def _summary(self) -> str:
        if not self._tokens:
            return "no token produced"
        wait = self._first - self._began
        rate = (self._tokens - 1) / (self._last - self._first) if self._tokens > 1 else 0.0
        nats = sum(completion.entropic_time for completion in self.completions)
        moved = sum(completion.cost for completion in self.completions)
        flops = sum(completion.flops for completion in self.completions)
        reasons = ", ".join(sorted({completion.finish_reason for completion in self.completions}))
        return (
            f"[{self._tokens} tokens ({reasons}), {rate:.1f} tokens/s, first after {wait:.2f} s; "
            f"entropic time {nats:.1f} nats, cost {moved / 1e6:.1f} MB moved and {flops / 1e9:.2f} GFLOP, "
            f"{nats / moved * 1e6:.3g} nats/MB{self._control()}]"
        )

    def _control(self) -> str:
        """What control did: blocks read, mass kept, temperature, and what the guards counted."""
        rows = [row for completion in self.completions for row in completion.trace]
        said = []
        held = sum(row.blocks_held for row in rows)
        if (read := sum(row.blocks_read for row in rows)) < held:
            said.append(f"read {100 * read / held:.0f}% of blocks, kept at least {min(r.kept_mass for r in rows):.3f}")
        for name in rows[0].guard_rates:
            worst = max(completion.guard_rates[name] for completion in self.completions if completion.trace)
            said.append(f"{name} {100 * worst:.0f}% of tokens")
        return "".join(f"; {part}" for part in said)


if __name__ == "__main__":
    sys.exit(main())
