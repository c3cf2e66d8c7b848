"""A report from the files of a run: `python -m et_jax.report trace.jsonl --output run.html`.

Reads the file of `--trace` of `et_jax.generate`, or the output of a batch.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from et_jax.cli import command
from et_jax.cli.paths import check_paths
from et_jax.cli.signals import Signals, guard
from et_jax.errors import UsageError
from et_jax.io.values import excerpt

if TYPE_CHECKING:
    from et_jax.report.page import Decode


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m et_jax.report",
        description="Write a page on a run: texts in colours of their entropy, and what control did.",
        allow_abbrev=False,
    )
    p.add_argument("file", help="the file of --trace, or the --output of a batch")
    p.add_argument("--output", "-o", required=True, metavar="FILE.html", help="the page to write")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return command.run(parser, _run, arguments, texts=())


def _run(args: argparse.Namespace, signals: Signals) -> int:
    from et_jax.report.batch import write_batch_report
    from et_jax.report.page import check_place, write_report
    from et_jax.report.rows import is_batch
    from et_jax.report.trace import read_trace

    signals.said = "interrupted before the page was written"
    source, output = Path(args.file), Path(args.output)
    check_paths({"the file": source}, {"--output": output}, None)
    check_place(args.output)
    if is_batch(source):
        write_batch_report(source, output, facts={"output": source.name})
        return 0
    about, completions = read_trace(source)
    facts = {"model": about.model, "control": about.control}
    write_report(completions, output, facts=facts, decode=_decode(about.model))
    return 0


def _decode(model: str) -> "Decode | None":
    """Return the `decode` of a model's tokenizer; None, with a message, if it is not on this machine."""
    from et_jax.models.local import local_model
    from et_jax.text import load_tokenizer

    try:
        if (folder := local_model(model)) is None:
            raise UsageError(f"there is no model {excerpt(model)} here")
        return load_tokenizer(folder).decode
    except UsageError as error:
        print(f"alternatives are shown by their ids: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    guard()
    sys.exit(main())
