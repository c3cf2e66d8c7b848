"""The command line that measures a model: `python -m et_jax.calibrate --model smollm2`.

Rows of text pass through the model. The temperature minimises the negative log-likelihood of their second halves (ETI
section 5; Guo et al. 2017); the decoder then measures its raw entropy at it. Where it saves less than a thousandth of a
nat a token it stays 1, which spares every step a pass over the vocabulary. The sensitivity says what an error in each
head's output costs in nats, by gradients on the same second halves; control "adaptive" reads by it.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `cli` listens: no traceback amid the imports to come

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from et_jax.cli import command, flags, streams
from et_jax.cli.signals import Signals, guard
from et_jax.errors import UsageError
from et_jax.io.files import check_writable, expanded
from et_jax.io.gguf import is_gguf
from et_jax.io.texts import read_text
from et_jax.io.values import integer

_WORTH = 1e-3  # nats a token that a temperature must save
_MOST_ROWS, _LEAST_LENGTH = 10_000, 8


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m et_jax.calibrate",
        description="Measure a model's temperature and how sensitive it is to each of its heads, and save both.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--model",
        required=True,
        help="bundled, bundled-small, smollm2, gemma3-270m, a Hugging Face folder, a GGUF file, a hub name",
    )
    flags.add_lora(p)
    p.add_argument(
        "--text", metavar="FILE", help="a text, or a tar archive of works, of which the held-out ones are read"
    )
    p.add_argument("--rows", type=int, metavar="N", help="rows of text (default 6)")
    p.add_argument("--length", type=int, metavar="T", help="tokens of a row (default 512, or the model's context)")
    p.add_argument(
        "--output",
        metavar="FOLDER",
        help="write calibration.json there (default: the user's cache, where loading finds it by the weights)",
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return command.run(parser, _run, arguments, texts=())


def _run(args: argparse.Namespace, signals: Signals) -> int:
    signals.said = "interrupted: nothing was saved"
    streams.check_standard_output()
    for name, least, most in (("rows", 1, _MOST_ROWS), ("length", _LEAST_LENGTH, 2**20)):
        if getattr(args, name) is not None:
            integer(f"--{name}", getattr(args, name), least, most)
    texts = None if args.text is None else _texts(Path(args.text))

    from et_jax.models.adapters import read_adapter
    from et_jax.models.calibration import FILE, read_calibration
    from et_jax.models.checkpoint import check_weights, read_model
    from et_jax.models.hub import resolve

    folder, adapter = resolve(args.model), None if args.lora is None else expanded(args.lora)
    model = read_model(folder)
    check_weights(folder, model)
    if adapter is not None:
        read_adapter(adapter, model)
    if args.output is not None:
        if is_gguf(folder) and adapter is None:
            raise UsageError(f"{args.model} is a GGUF file, of which the cache alone is read; leave --output out.")
        check_writable(Path(args.output) / FILE)
    elif (own := (adapter or folder) / FILE).exists() and read_calibration(
        folder, model, adapter
    ).sensitivity is not None:
        raise UsageError(f"{own} is read before the cache; replace it with --output {own.parent}.")
    return _measure(args, folder, adapter, model, texts)


def _measure(args: argparse.Namespace, folder: Path, adapter: Path | None, model: Any, texts: list[str] | None) -> int:
    """Measure, write and print."""
    import numpy as np

    from et_jax.models.calibration import TEXT, Calibration, keep_calibration, write_calibration
    from et_jax.report.display import Status
    from et_jax.scope import own_settings
    from et_jax.serve.loading import calibrating
    from et_jax.serve.memory.device_memory import usable_memory
    from et_jax.tasks.calibration import fit_temperature, held_out_logits, negative_log_likelihood
    from et_jax.text import load_tokenizer
    from et_jax.types import Table

    began, tokenizer = time.perf_counter(), load_tokenizer(folder)
    length = min(calibrating.LENGTH, model.max_positions) if args.length is None else args.length
    if length > model.max_positions:
        raise UsageError(f"--length is {length}; {args.model} was made for {model.max_positions} tokens.")
    named = TEXT if args.text is None else Path(args.text)
    if texts is None and args.rows is None and args.length is None:
        tokens = calibrating.default_rows(tokenizer, model)
    else:
        read = [read_text(TEXT, "The text")] if texts is None else texts
        tokens = calibrating.rows(tokenizer, read, str(named), args.rows or calibrating.ROWS, length)
    with Status() as status, own_settings():
        status.show(f"loading {args.model}")
        params = calibrating.floats(folder, model, "auto", usable_memory(0.9), adapter)
        sensitivity = calibrating.measured(args.model, model, params, tokens, status.show).astype(np.float32)
        status.show("fitting the temperature")
        logits, targets = held_out_logits(model, params, tokens)
        temperature = float(fit_temperature(logits, targets))
        before, after = (float(negative_log_likelihood(logits, targets, t)) for t in (1.0, temperature))
    if before - after < _WORTH:
        temperature, after = 1.0, before
    facts = calibrating.facts(args.model, named.name, params, tokens)
    facts |= {"nats_per_token_at_1": round(before, 5), "nats_per_token": round(after, 5)}
    found = Calibration(temperature=temperature, sensitivity=Table(sensitivity))
    kept = keep_calibration(folder, found, facts, adapter) if args.output is None else None
    path = kept or write_calibration(Path(args.output), found, facts)
    seconds = time.perf_counter() - began
    print(f"{args.model} on {named.name}: {len(tokens)} rows of {tokens.shape[1]} tokens in {seconds:.0f} s")
    print(f"temperature {temperature:.4f}: {before:.4f} -> {after:.4f} nats per token")
    for number, layer in enumerate(sensitivity):
        print(f"layer {number}: nats a squared error in a head's output from {layer.min():.4g} to {layer.max():.4g}")
    print(f"written to {path}")
    return 0


def _texts(path: Path) -> list[str]:
    """Return the held-out works of a tar archive, or the text of another file. Raises UsageError."""
    if ".tar" not in path.suffixes:
        return [read_text(path, "The text")]
    from et_jax.training import corpus

    works = corpus.read_works(path)
    return [works[name] for name in corpus.split(works)[1]]


if __name__ == "__main__":
    guard()
    sys.exit(main())
