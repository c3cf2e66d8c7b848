"""The command line: `python -m et_jax.generate --prompt "It was"`, or `--input in.jsonl --output out.jsonl`.

The text of a prompt goes to standard output as it comes; everything else goes to standard error.
"""

import gc
import signal

if __name__ == "__main__":
    gc.set_threshold(50_000)  # a start makes a million lasting objects; the default 700 would search them often
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `cli` listens: no traceback amid the imports to come

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from et_jax.cli import command, flags, streams
from et_jax.cli.signals import Signals, guard
from et_jax.commands import files, settings
from et_jax.control.presets import PRESETS
from et_jax.errors import UsageError
from et_jax.io import later

if TYPE_CHECKING:
    from et_jax.report.display import Status
    from et_jax.report.trace import About
    from et_jax.serve.config import EngineConfig
    from et_jax.serve.engine import Model
    from et_jax.serve.requests import SamplingParams

_RESUME = "interrupted: {} keeps what is done; run the same command again to resume"
_BATCH_SEQUENCES = 8  # the default number of sequences per step


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m et_jax.generate",
        description="Continue a prompt, or every line of a file, with the entropy of every token measured.",
        epilog="A signal that is ignored when the command starts stays ignored: SIGINT in the background of a script, "
        "SIGHUP under nohup. SIGTERM ends the command there; what is done is kept.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--model",
        default="bundled",
        help="bundled (default), bundled-small, smollm2, gemma3-270m, a Hugging Face folder, a GGUF file, a hub name",
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", "-p", help="the text to continue; - reads standard input (at most 16 MiB)")
    source.add_argument(
        "--input",
        "-i",
        metavar="FILE",
        help="a prompt per line: JSON lines, .parquet, a saved data set, hf://datasets/OWNER/NAME/FILE; see --ray",
    )
    p.set_defaults(input_commit=None)  # of a file on the hub
    source.add_argument("--interactive", action="store_true", help="chat on the terminal; /help shows its commands")
    source.add_argument(
        "--check", action="store_true", help="say whether the model will run here and what it needs; reads no weight"
    )
    p.add_argument("--output", "-o", metavar="FILE", help="where the answers to --input go, .jsonl or .parquet")
    p.add_argument(
        "--prompt-column", metavar="NAME", help="the field of --input with the prompt; unknown fields are ignored"
    )
    flags.add_prefix(p)
    p.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the model's chat template")
    p.add_argument("--system-prompt", help="the system message, with --chat or --input")
    p.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="read special tokens that messages spell as such; else they are text",
    )
    p.add_argument("--max-tokens", type=int, default=256, help="tokens to produce at most (default 256)")
    flags.add_sampling(p.add_argument_group("sampling"))
    flags.add_control(p, PRESETS)
    flags.add_experts(p)
    draft = p.add_argument_group("drafts", "guess tokens ahead and verify them together: the same text, sooner")
    flags.add_drafts(draft)
    machine = p.add_argument_group("model and memory")
    flags.add_weights(machine)
    flags.add_adapters(machine)
    machine.add_argument("--page-size", type=int, help="tokens per cache page (16 on CPU, 64 on GPU, 128 on TPU)")
    machine.add_argument("--max-model-len", type=int, help="prompt and text together, in tokens")
    machine.add_argument("--max-num-seqs", type=int, help="sequences decoded together (default --n; with --input 8)")
    machine.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="prompt tokens read between two steps (default 512)"
    )
    machine.add_argument(
        "--replicas", type=int, default=1, help="decoders that share the work, on the devices in turn (default 1)"
    )
    machine.add_argument(
        "--tensor-parallel", type=int, default=1, help="devices that each decoder is split over (default 1)"
    )
    machine.add_argument("--num-pages", type=int, help="pages of the cache (default: for everything, if it fits)")
    flags.add_cache(machine)
    flags.add_calibration(machine)
    machine.add_argument(
        "--memory-fraction", type=float, default=0.9, help="share of the free memory that may be used (default 0.9)"
    )
    flags.add_ray(p.add_argument_group("Ray", "batch files on a cluster (extra ray)"))
    output = p.add_argument_group("output")
    output.add_argument("--metrics", metavar="FILE", help="write counters in Prometheus's text format")
    output.add_argument("--json", action="store_true", help="print one JSON object per continuation, at the end")
    output.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    output.add_argument("--verbose", action="store_true", help="say what runs where")
    output.add_argument(
        "--trace", metavar="FILE", help="write JSON lines, one per token: entropy, temperature, cost ..."
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw the same as a picture")
    output.add_argument(
        "--report", metavar="FILE.html", help="write a page: the text in colours of its entropy, and what control did"
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return command.run(
        parser, _run, arguments, texts=("prompt", "system_prompt", "stop", "bad_word", "regex", "choice")
    )


def _run(args: argparse.Namespace, signals: Signals) -> int:
    flags.check_combination(args)
    if not args.ray:
        files.check_written(args)
    files.download_input(args)
    if not args.ray:
        files.check_distinct(args)
    if args.check:
        return _run_check(args)
    if args.interactive:
        return _run_chat(args, signals)
    if args.input is None:
        return _run_prompt(args, signals)
    return _run_ray(args, signals) if args.ray else _run_batch(args, signals)


def _run_check(args: argparse.Namespace) -> int:
    from et_jax.scope import platform
    from et_jax.serve.loading.verdict import verdict

    streams.check_standard_output()
    print("\n".join(verdict(settings.engine(args, args.n, settings.controller(args, platform())))))
    return 0


def _run_prompt(args: argparse.Namespace, signals: Signals) -> int:
    from et_jax.report.display import Report, Status
    from et_jax.report.trace import TraceWriter
    from et_jax.scope import platform

    signals.said = "interrupted before the first token"
    streams.check_standard_output()
    prompt = streams.read_standard_input() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UsageError("The prompt is empty; give some text with --prompt, or on standard input with --prompt -.")
    with ExitStack() as stack:
        params, control = settings.sampling(args), settings.controller(args, platform())
        status = stack.enter_context(Status())
        model = _load(args, settings.engine(args, params.sampled, control), status)
        ids = (
            [
                model.tokenizer.chat(
                    [{"role": "user", "content": prompt}],
                    args.system_prompt,
                    allow_special_tokens=args.allow_special_tokens,
                )
            ]
            if args.chat
            else [prompt]
        )
        trace = None
        if args.trace is not None:  # an existing file stays until there is something to write
            about = _about(args, model, ids[0], params)
            trace = TraceWriter(stack.enter_context(streams.open_text(args.trace)), about)
        report = Report(status, trace, params, as_json=args.json, stream=not args.no_stream)
        events = model.stream(ids, params, cancelled=signals.received)
        model.warm_up(drafts=False)  # before there is a text to keep: an interrupt ends it at once
        _load_prefix(args, model)
        if args.save_prefix is not None:
            model.save_prefix(ids[0], args.save_prefix)
        signals.defer()
        for event in events:
            signals.said = "interrupted"
            report.take(event)
    report.close()
    written = [command.succeeded(report.check_trace)]
    if args.metrics is not None:
        written.append(command.succeeded(lambda: model.metrics.write(Path(args.metrics))))
    if args.plot is not None and report.completions:
        from et_jax.report.plot import plot_trace

        written.append(command.succeeded(lambda: plot_trace(report.completions[0], Path(args.plot))))
    if args.report is not None:
        from et_jax.report.page import write_report

        about, decode = settings.facts(args), model.tokenizer.decode
        page = partial(write_report, report.completions, args.report, facts=about, decode=decode)
        written.append(command.succeeded(page))
    for completion in report.completions:
        if completion.error:
            print(f"error: {completion.error}", file=sys.stderr)
            return command.FAILED
    return signals.code or (0 if all(written) else command.FAILED)


def _run_chat(args: argparse.Namespace, signals: Signals) -> int:
    from et_jax.report.conversation import Conversation, converse
    from et_jax.report.display import Status
    from et_jax.scope import platform

    streams.check_standard_output()
    params = settings.sampling(args)
    with Status() as status:
        model = _load(args, settings.engine(args, 1, settings.controller(args, platform())), status)
        special = args.allow_special_tokens
        _load_prefix(args, model)
        chat = Conversation(model, params, args.system_prompt, allow_special_tokens=special)
    return converse(chat, signals)


def _about(args: argparse.Namespace, model: "Model", prompt: "str | list[int]", params: "SamplingParams") -> "About":
    """Return the header of a trace. Raises UsageError for an invalid prompt."""
    from et_jax.report.trace import About
    from et_jax.serve.requests import GenerationRequest

    first = model.sequences(0, GenerationRequest(prompt=prompt, params=params))[0]
    return About(
        model=args.model,
        control=args.control,
        min_context=first.laws.min_context,
        n=params.n,
        prompt=first.prompt,
        prompt_tokens=len(first.prompt_ids),
    )


def _run_batch(args: argparse.Namespace, signals: Signals) -> int:
    """Serve a file; what the answers depend on is settled before the model is loaded."""
    from et_jax.batch.job import run, survey
    from et_jax.batch.journal import check_files, open_journal
    from et_jax.batch.source import spooled
    from et_jax.batch.table import is_table, journal_of, write_table
    from et_jax.batch.tasks import read_entries
    from et_jax.report.batch import Extremes, write_batch_report
    from et_jax.report.display import Status
    from et_jax.scope import platform
    from et_jax.serve.metrics import Metrics
    from et_jax.serve.requests import GenerationRequest

    table = Path(args.output)
    source, output = Path(args.input), journal_of(table)
    signals.said = _RESUME.format(output)
    defaults = settings.defaults(args)
    engine = settings.engine(args, _BATCH_SEQUENCES, settings.controller(args, platform()))
    metrics = None if args.metrics is None else Path(args.metrics)
    extremes = Extremes()
    check_files(source, output)
    decisive = settings.batch_settings(args, engine, defaults, platform())
    with Status() as status, open_journal(output, decisive) as journal, spooled(source) as lines:
        if metrics is not None:
            Metrics().write(metrics)
        summary = survey(lines, journal, args.prompt_column)
        if summary.done < summary.total:
            model = _load(args, engine, status)
            if defaults.params.grammar is not None:  # an invalid grammar would fail every line
                model.sequences(0, GenerationRequest(prompt=(0,), params=defaults.params))
            model.warm_up()
            _load_prefix(args, model)
            status.clear()
            watch = {} if args.report is None else {"watch": extremes.take}
            run(model, lines, journal, defaults, summary, metrics_file=metrics, cancelled=signals.defer(), **watch)
        if is_table(table) and summary.done == summary.total:
            write_table(table, output, read_entries(lines, args.prompt_column))
    print(summary, file=sys.stderr)
    written = args.report is None or command.succeeded(
        lambda: write_batch_report(output, Path(args.report), facts=settings.facts(args), extremes=extremes)
    )
    if summary.done < summary.total:
        print(_RESUME.format(output), file=sys.stderr)
        return signals.code or command.FAILED
    return 0 if written else command.FAILED


def _run_ray(args: argparse.Namespace, signals: Signals) -> int:
    """Serve a file or a folder by actors. A signal ends this at once; written rows stay."""
    import jax

    from et_jax.batch.ray import cluster, folder
    from et_jax.cli.paths import check_paths
    from et_jax.io import values
    from et_jax.models.local import local_model

    jax.config.update("jax_platforms", "cpu")  # accelerators are the actors'
    signals.said = _RESUME.format(args.output)
    given = {} if args.ray_resources is None else flags.amounts("ray-resources", args.ray_resources)
    fleet = folder.Fleet(
        address=args.ray_address,
        actors=values.integer("ray_actors", 1 if args.ray_actors is None else args.ray_actors, 1),
        resources=cluster.check_resources(given),
    )
    defaults = settings.defaults(args)
    platform = cluster.platform_of(fleet.resources)
    engine = settings.engine(args, _BATCH_SEQUENCES, settings.controller(args, platform))
    placed = folder.shards(args.input, Path(args.output))
    for source, output in placed.items():
        check_paths({"--input": source}, {"--output": output}, local_model(args.model))
    decisive = settings.batch_settings(args, engine, defaults, platform)
    print(folder.run(placed, decisive, engine, defaults, fleet, verbose=args.verbose), file=sys.stderr)
    return 0


def _load(args: argparse.Namespace, engine: "EngineConfig", status: "Status") -> "Model":
    from et_jax.serve.engine import load

    model = load(**engine.given, progress=status.show)
    if args.verbose:
        status.clear()
        for line in model.describe():
            print(line, file=sys.stderr)
    return model


def _load_prefix(args: argparse.Namespace, model: "Model") -> None:
    if args.prefix is not None:
        model.load_prefix(args.prefix)


if __name__ == "__main__":
    guard()
    later.leave(main())
