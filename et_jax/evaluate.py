"""The command line for tasks: `python -m et_jax.evaluate --task single_key --length 512`.

The table goes to standard output; everything else goes to standard error.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `cli` listens: no traceback amid the imports to come

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from et_jax.cli import command, flags, streams
from et_jax.cli.signals import Signals, guard

if __name__ == "__main__":
    guard()  # what is imported next takes a second


from et_jax.cli.paths import check_paths
from et_jax.commands import settings
from et_jax.control.presets import KNOBS, PRESETS, preset
from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_file
from et_jax.io.texts import read_text
from et_jax.io.values import integer
from et_jax.models.local import local_model
from et_jax.tasks import files, scored
from et_jax.tasks.answers import plot, summary, table
from et_jax.tasks.asking import chat_tokens, counter, evaluate, grid
from et_jax.tasks.base import sentences
from et_jax.tasks.generators import NUM_PAIRS, TASKS

if TYPE_CHECKING:
    from et_jax.serve.engine import Model

LOSS, SCORE = "loss", "score"  # the tasks without questions
_MOST_PROMPTS = 100_000  # of a run: a day's work for the bundled model on two cores
_BOUNDS = {
    "length": (1, 2**20),
    "depths": (1, 1000),
    "samples": (1, 100_000),
    "batch": (1, 2**20),
    "pairs": (0, 100_000),
    "seed": (0, 2**63 - 1),
}
"""The bounds of every count."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m et_jax.evaluate",
        description="Ask a model questions whose answers are somewhere in a long text.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--model",
        default="bundled",
        help="bundled (default), bundled-small, smollm2, gemma3-270m, a Hugging Face folder, a GGUF file, a hub name",
    )
    p.add_argument(
        "--task",
        action="append",
        help=f"repeatable (default: all of the first): {', '.join(TASKS)}; with --prompts {', '.join(files.FILES)}; "
        f"with --haystack {LOSS}, the loss of its text by position; with --input {SCORE}, the log-probability and the "
        "entropy of every token",
    )
    p.add_argument(
        "--length",
        action="append",
        type=int,
        help=f"tokens of prompt and answer; repeatable (default 512); of {SCORE}, tokens read at once (default: all)",
    )
    p.add_argument("--depths", type=int, default=5, help="places of the answer, from start to end (default 5)")
    p.add_argument("--samples", type=int, default=4, help="examples at each length and depth, or of a file (default 4)")
    p.add_argument("--pairs", type=int, default=NUM_PAIRS, help="keys besides the one asked for (default 7)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same examples (default 0)")
    p.add_argument("--haystack", help="a text to hide answers in (default: invented sentences)")
    p.add_argument("--prompts", help="a file of JSON lines for the tasks that are read, not generated")
    p.add_argument(
        "--input", metavar="FILE", help=f'what {SCORE} reads: a text, or a .jsonl file of lines {{"text": "..."}}'
    )
    p.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    flags.add_control(p, PRESETS)
    flags.add_experts(p)
    machine = p.add_argument_group("model and memory")
    flags.add_weights(machine)
    machine.add_argument("--page-size", type=int, help="tokens per cache page (16 on CPU, 64 on GPU, 128 on TPU)")
    flags.add_cache(machine)
    flags.add_calibration(machine)
    machine.add_argument("--batch", type=int, default=8, help="prompts decoded together (default 8)")
    output = p.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write every example, answer and accuracy; - is standard output")
    output.add_argument("--plot", metavar="FILE.png", help="draw accuracy by length and depth")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return command.run(parser, _run, arguments, texts=("task",))


def _run(args: argparse.Namespace, signals: Signals) -> int:
    signals.said = "interrupted before the last answer"
    streams.check_standard_output()
    tasks, lengths = args.task or list(TASKS), args.length or [512]
    _check(args, tasks, lengths)
    read = {f"--{name}": _path(getattr(args, name)) for name in ("haystack", "prompts", "input")}
    written = {"--json": None if args.json == "-" else _path(args.json), "--plot": _path(args.plot)}
    check_paths(read, written, local_model(args.model))
    text = "" if args.haystack is None else read_text(Path(args.haystack), "The haystack")
    texts = [] if args.input is None else scored.texts_of(Path(args.input))
    control = preset(args.control, **flags.given(args, KNOBS))
    from et_jax.serve.config import EngineConfig
    from et_jax.serve.engine import load

    given = settings.named(args, EngineConfig) | {"control": control, "max_num_seqs": args.batch}
    model = load(args.model, **given)
    if args.prompts is None and max(args.length or [0 if tasks == [SCORE] else 512]) > model.max_model_len:
        raise UsageError(f"--length is {max(lengths)}; {args.model} has room for {model.max_model_len} tokens.")
    if tasks == [LOSS]:
        return _run_loss(args, model, text, lengths, signals)
    if tasks == [SCORE]:
        return _run_score(args, model, texts, signals)
    count, taken = counter(model), chat_tokens(model.tokenizer) if args.chat else 0
    if args.prompts is not None:
        [task] = tasks
        found = files.examples(task, Path(args.prompts), count, args.samples)
        asked = [(max(one.length for one in found), one) for one in found]
    else:
        print(f"making {_num_prompts(args, tasks, lengths)} prompts ...", file=sys.stderr)
        asked = grid(
            count,
            tasks,
            lengths,
            depths=args.depths,
            samples=args.samples,
            pairs=args.pairs,
            seed=args.seed,
            haystack=None if args.haystack is None else sentences(text),
            taken=taken,
        )
    print(f"{len(asked)} prompts for {args.model} ...", file=sys.stderr)
    answers = evaluate(model, asked, chat=args.chat)
    signals.defer()  # the first signal waits until they are written
    report = _about(args) | {"summary": summary(answers), "answers": [dataclasses.asdict(one) for one in answers]}
    written = args.plot is None or command.succeeded(lambda: plot(answers, Path(args.plot)))
    written &= command.succeeded(lambda: _write(args.json, report))
    print(table(answers), file=sys.stderr if args.json == "-" else sys.stdout, flush=True)  # whose reader may be gone
    return signals.code or (0 if written else command.FAILED)


def _run_loss(args: argparse.Namespace, model: "Model", text: str, lengths: list[int], signals: Signals) -> int:
    """Print and write the mean loss of rows of the text between positions."""
    from et_jax.tasks.position_loss import by_position, position_losses, rows

    opening = model.tokenizer.encode("")
    ids = model.tokenizer.encode(text)[len(opening) :]
    bytes_per_token = len(text.encode()) / max(len(ids), 1)
    decoder = model.decoder(keep=frozenset({"logits"}))
    report: list[dict[str, Any]] = []
    for length in lengths:
        chosen = rows(ids, opening[0] if opening else None, length, args.samples)
        losses = position_losses(decoder, model.weights, chosen)
        mean = float(losses.mean())
        report.append({"length": length, "nats_per_token": mean, "nats_per_byte": mean / bytes_per_token})
        report[-1]["by_position"] = [
            {"from": begin, "to": end, "nats_per_token": nats} for (begin, end), nats in by_position(losses).items()
        ]
    signals.defer()
    facts = _about(args) | {"samples": args.samples, "loss": report}
    written = command.succeeded(lambda: _write(args.json, facts))
    out = sys.stderr if args.json == "-" else sys.stdout
    for row in report:
        spans = "  ".join(
            f"{span['from']}-{span['to'] - 1}: {span['nats_per_token']:.3f}" for span in row["by_position"]
        )
        print(f"length {row['length']}: {row['nats_per_token']:.3f} nats a token,", end=" ", file=out)
        print(f"{row['nats_per_byte']:.3f} a byte; by position {spans}", file=out)
    return signals.code or (0 if written else command.FAILED)


def _run_score(args: argparse.Namespace, model: "Model", texts: list[str], signals: Signals) -> int:
    """Print and write the scores of texts under the model."""
    out = sys.stderr if args.json == "-" else sys.stdout
    window = model.max_model_len if args.length is None else args.length[0]
    print(scored.HEADER, file=out, flush=True)
    found = []
    for number, score in enumerate(scored.score_texts(model, texts, window), 1):
        found.append(scored.figures(score))
        print(scored.line(number, found[-1]), file=out, flush=True)
    signals.defer()
    written = args.plot is None or command.succeeded(lambda: scored.plot(found, Path(args.plot)))
    written &= command.succeeded(lambda: _write(args.json, _about(args) | {"length": window, "texts": found}))
    return signals.code or (0 if written else command.FAILED)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    hay = "invented sentences" if args.haystack is None else Path(args.haystack).name
    about = {"model": args.model, "control": args.control, "seed": args.seed, "haystack": hay}
    return about | flags.given(args, (*KNOBS, *flags.CACHE, *flags.EXPERTS, "quantize"))


def _write(path: str | None, report: dict[str, Any]) -> None:
    """Write a report as JSON to a file, atomically, or to standard output if the path is -."""
    if path is None:
        return
    text = json.dumps(report, indent=1)
    if path == "-":
        print(text)
    else:
        replace_file(path, text + "\n")


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _num_prompts(args: argparse.Namespace, tasks: list[str], lengths: list[int]) -> int:
    """Return how many prompts `grid` makes."""
    return len(tasks) * len(lengths) * args.depths * args.samples


def _check(args: argparse.Namespace, tasks: list[str], lengths: list[int]) -> None:
    """Raise UsageError, before anything is loaded, for arguments that cannot work."""
    if args.prompts is not None and len(tasks) != 1:
        raise UsageError("--prompts belongs to one task; name it with --task.")
    if LOSS in tasks and (tasks != [LOSS] or args.haystack is None or args.plot):
        raise UsageError(f"{LOSS} goes alone, with a text named by --haystack and without --plot.")
    if (tasks == [SCORE]) != (args.input is not None) or (SCORE in tasks and len(tasks + lengths) > 2):
        raise UsageError(f"--input FILE and --task {SCORE} belong together, with one --length at most.")
    if tasks == [SCORE] and lengths[0] < 2:
        raise UsageError("--length is 1; a token is scored by one before it, so read 2 at once at least.")
    ignored = [name for name in (*flags.EXPERTS, *flags.CACHE) if getattr(args, name) is not None]
    if tasks == [SCORE] and ignored:
        raise UsageError(f"--{ignored[0].replace('_', '-')} changes no score; leave it out.")
    if tasks == [SCORE] and (args.haystack is not None or args.prompts is not None or args.control != "off"):
        raise UsageError(
            f"{SCORE} reads --input alone, with dense attention; leave --haystack, --prompts and --control out."
        )
    if args.chat and tasks in ([LOSS], [SCORE]):
        raise UsageError(f"{tasks[0]} asks nothing; leave --chat out.")
    known, other = (files.FILES, TASKS) if args.prompts is not None else (TASKS, files.FILES)
    for task in tasks:
        if task in (LOSS, SCORE):
            continue
        if task in other and args.prompts is None:
            raise UsageError(f"{task} is read from a file; name the file with --prompts.")
        if task not in known:
            raise UsageError(f'There is no task "{task}" here; choose one of {", ".join(known)}.')
    for name, (least, most) in _BOUNDS.items():
        for value in lengths if name == "length" else [getattr(args, name)]:
            integer(f"--{name}", value, least, most)
    if args.prompts is None and tasks not in ([LOSS], [SCORE]) and _num_prompts(args, tasks, lengths) > _MOST_PROMPTS:
        raise UsageError(
            f"--task, --length, --depths and --samples make {_num_prompts(args, tasks, lengths)} prompts "
            f"and at most {_MOST_PROMPTS} are asked; ask for fewer."
        )
    if args.json not in (None, "-"):
        check_writable(args.json)
    if args.plot is not None:
        from et_jax.report.plot import check_picture

        check_picture(args.plot)


if __name__ == "__main__":
    sys.exit(main())
