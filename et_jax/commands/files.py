"""The files of `python -m et_jax.generate`: checked before any is written."""

import argparse
from pathlib import Path

from et_jax.cli import flags
from et_jax.cli.paths import check_paths
from et_jax.io.files import check_writable, expanded


def check_written(args: argparse.Namespace) -> None:
    """Raise UsageError, before any work, unless every file of the command can be written."""
    from et_jax.batch.table import check_table, is_table, journal_of

    rows = args.output
    if rows is not None and is_table(Path(rows)):
        check_table(Path(rows))
        rows = journal_of(Path(rows))
    for file in (rows, args.trace):
        if file is not None:
            check_writable(file, grows=True)
    for name in ("metrics", "save_prefix"):
        if getattr(args, name) is not None:
            check_writable(getattr(args, name))
    if args.plot is not None:
        from et_jax.report.plot import check_picture

        check_picture(args.plot)
    if args.report is not None:
        from et_jax.report.page import check_place

        check_place(args.report)


def download_input(args: argparse.Namespace) -> None:
    """Put the local copy of an --input on the hub in the place of its address. Raises UsageError if there is none."""
    if args.input is not None and args.input.startswith("hf://"):
        from et_jax.batch.hub import download

        path, args.input_commit = download(args.input)
        args.input = str(path)


def check_distinct(args: argparse.Namespace) -> None:
    """Find out before anything is written that no file of the command is another one."""
    from et_jax.batch.manifest import manifest_path
    from et_jax.batch.table import journal_of
    from et_jax.models.fingerprint import ADAPTER
    from et_jax.models.local import local_model

    def path(name: str) -> Path | None:
        return None if getattr(args, name) is None else Path(getattr(args, name))

    if args.prefix is not None:
        from et_jax.serve.saved_prefix import place_of

        place_of(args.prefix)
    written = {"--output": path("output")}
    if args.output is not None:
        rows = journal_of(Path(args.output))
        written["the manifest of --output,"] = manifest_path(rows)
        if rows != Path(args.output):
            written["the rows of --output,"] = rows
    written |= {f"--{name}": path(name) for name in ("metrics", "trace", "plot", "report")}
    written["--save-prefix"] = path("save_prefix")
    read = {"--input": path("input"), "--prefix": path("prefix")}
    folders = {
        "--lora": args.lora,
        **{f"--adapter {name}": one for name, one in (flags.adapters(args.adapter) or {}).items()},
    }
    read |= {
        f"the {name} of {flag},": expanded(folder) / name
        for flag, folder in folders.items()
        if folder
        for name in ADAPTER
    }
    check_paths(read, written, local_model(args.model))
