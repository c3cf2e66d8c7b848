"""Processes that compute on the chip, one after the other: each finds the chip's memory as new."""

import importlib
import multiprocessing
import os
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from scripts.chip.cases import Case, Settings
from scripts.chip.modelled import modelled

BY = {"decode": "decoding", "torch": "torch_step"}


def measured(settings: Settings, cases: Sequence[Case]) -> Generator[dict[str, Any]]:
    """Yield what a process finds of each case, in order; {"error": a line} stands last where it failed or ended.

    The process ends with the iteration.
    """
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(settings, cases, end), daemon=True)
    process.start()
    end.close()
    try:
        for _ in cases:
            yield results.recv()
    except EOFError:
        process.join()
        yield {"error": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def work(settings: Settings, cases: Sequence[Case], results: Connection) -> None:
    """Send what is found of each case, all of one engine, until one fails."""
    # The device's memory is taken as one piece, nearly all of it: pools of pages are large beside what is free.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    found = importlib.import_module(f"scripts.chip.{BY[cases[0].engine]}").measured(cases, settings)
    for case in cases:
        try:
            figures = next(found)
        except Exception as error:  # of memory, or of a kernel
            results.send({"error": reason(error)})
            return
        model = modelled(case, figures.get("share_read"))
        results.send(figures | ({} if model is None else {"modelled": model["milliseconds"]}))


def reason(error: Exception) -> str:
    """Return in a line why a case failed."""
    words = str(error)
    first = (words.splitlines() or [""])[0]
    if "RESOURCE_EXHAUSTED" in words or "out of memory" in words.lower():
        return f"out of memory: {first[:200]}"
    return f"{type(error).__name__}: {first[:300]}"
