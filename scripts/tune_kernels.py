"""Find the best settings of a kernel for named shapes on the device here, and record those that beat the rule.

    python -m scripts.tune_kernels [--op paged_attention] [--backend triton] [--shape NAME] [--rounds 15]

For each shape the settings that the rule gives and their neighbours (every number halved, kept or doubled, every switch
both ways) are checked against the definition, then timed in turns, round after round. The one with the least median
time is recorded in `et_jax/pallas/tuned/<device kind>.json` if it beats the rule by more than noise; an entry that no
longer does is removed. The figures go to `benchmarks/results/tuning-<device kind>.json`.
"""

import argparse
import dataclasses
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import lax

from et_jax.io.files import replace_file
from et_jax.pallas import tuned
from et_jax.pallas.backend import NAMES, pick
from scripts.measuring.results import REPOSITORY, machine
from scripts.measuring.timing import Round, in_turns, seconds

_OPS = ("paged_attention", "paged_prefill", "block_scores")
FOLDERS = {name: name for name in _OPS} | {"code_scores": "block_scores"}
NOISE = 0.05  # settings must beat the rule by this share of its time
LEAST_SECONDS = 0.02  # of a timed run, so that the cost of a launch does not count
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def kernel_of(op: str, backend: str, shape: Any) -> Callable[..., Any]:
    """Return an op's kernel of a backend, with the settings of a shape."""
    module = importlib.import_module(f"et_jax.pallas.{FOLDERS[op]}.{backend}")
    return partial(getattr(module, op), **shape.settings)


def neighbours(config: Any) -> Iterator[Any]:
    """Yield the configuration itself, then those around it that its class accepts."""

    def choices(value: Any) -> list[Any]:
        if dataclasses.is_dataclass(value):
            return list(neighbours(value))
        return [value, not value] if isinstance(value, bool) else [value, 2 * value, value // 2, 4 * value]

    names = [field.name for field in dataclasses.fields(config)]
    for values in itertools.product(*(choices(getattr(config, name)) for name in names)):
        try:
            yield type(config)(**dict(zip(names, values, strict=True)))
        except ValueError:
            continue


def rule_of(kernel: Callable[..., Any], given: dict[str, Any]) -> tuple[str, Any]:
    """Return the table's key that a kernel looks up for these arguments, and the settings of its rule."""
    with mock.patch.object(tuned, "settings", side_effect=lambda by_rule, *_, **__: by_rule) as looked_up:
        jax.eval_shape(lambda arrays: kernel(**arrays), given)
    [call] = looked_up.call_args_list
    by_rule, name = call.args
    return tuned.key(name, **call.kwargs), by_rule


def candidate(kernel: Callable[..., Any], config: Any, given: dict[str, Any], wanted: Any) -> Round | None:
    """Return a run of settings that give the right answer, or None with the reason printed."""
    tolerance = TOLERANCE[str(given["q"].dtype)]
    try:
        got = jax.jit(lambda arrays: kernel(**arrays, config=config))(given)
    except Exception as reason:  # each compiler has its own
        print(f"  {config}: refused, {str(reason).splitlines()[0][:160]}")
        return None
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    both = ([np.asarray(one, np.float64) for one in pair] for pair in pairs)
    if not all(np.allclose(*pair, rtol=tolerance, atol=tolerance, equal_nan=True) for pair in both):
        print(f"  {config}: WRONG, not timed")
        return None

    def chain(arrays: dict[str, Any], calls: Any) -> Any:
        def call(_: Any, query: Any) -> Any:
            # the next call waits for all of this one's first result
            first = jax.tree.leaves(kernel(**(arrays | {"q": query}), config=config))[0]
            return query + (0.0 * first.max()).astype(query.dtype)

        return lax.fori_loop(0, calls, call, arrays["q"])

    run = jax.jit(chain)
    seconds(lambda: run(given, 1))  # compiles
    calls = max(1, round(LEAST_SECONDS / seconds(lambda: run(given, 1))))
    return lambda: {"milliseconds": 1e3 * seconds(lambda: run(given, calls)) / calls}


def tune(op: str, backend: str, shape: Any, rounds: int) -> dict[str, Any] | None:
    """Return the key of a shape, the rule's settings, the best ones, and their figures; None where unsupported."""
    kernel = kernel_of(op, backend, shape)
    taken = inspect.signature(kernel).parameters
    example = importlib.import_module(f"scripts.measuring.kernel_shapes.{FOLDERS[op]}").example(shape)
    given = {name: x for name, x in example.items() if name in taken and x is not None}
    print(f"{op}/{backend} {shape.name}")
    try:
        key, by_rule = rule_of(kernel, given)
    except NotImplementedError as reason:
        print(f"  {reason}")
        return None
    definition = kernel_of(op, "reference", shape)
    wanted = jax.jit(lambda arrays: definition(**arrays))(given)
    found = {config: candidate(kernel, config, given, wanted) for config in neighbours(by_rule)}
    runs = {config: run for config, run in found.items() if run is not None}
    if by_rule not in runs:
        print("  the rule's own settings failed: nothing to compare with")
        return None
    names = {str(config): config for config in runs}
    times = in_turns({name: runs[config] for name, config in names.items()}, rounds)
    taking = {name: np.asarray(figures["milliseconds"]) for name, figures in times.items()}
    ratios = {name: float(np.median(each / taking[str(by_rule)])) for name, each in taking.items()}
    for name, ratio in ratios.items():
        print(f"  {np.median(taking[name]):9.3f} ms {ratio:6.3f} of the rule  {name}")
    best = min(ratios, key=lambda name: ratios[name])
    settings = {"by_rule": dataclasses.asdict(by_rule), "best": dataclasses.asdict(names[best])}
    figures = {"median_ms": float(np.median(taking[best])), "ratio": ratios[best]}
    return {"shape": shape.name, "key": key} | settings | figures


def record(results: list[dict[str, Any]]) -> None:
    """Put the settings that beat the rule into this device's table, and remove those that no longer do."""
    table = tuned.path(jax.devices()[0].device_kind)
    entries = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    for result in results:
        entries.pop(result["key"], None)
        if result["ratio"] < 1 - NOISE:
            entries[result["key"]] = result["best"]
            print(f"recorded {result['key']}: {result['best']}, {result['ratio']:.3f} of the rule's time")
    if entries:
        table.parent.mkdir(exist_ok=True)
        replace_file(table, json.dumps(entries, indent=1, sort_keys=True) + "\n")
    else:
        table.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=FOLDERS, action="append", help="an op, or several; all by default")
    parser.add_argument("--backend", choices=NAMES, help="by default the best for this device")
    parser.add_argument("--shape", action="append", default=[], help="a name, or several; by default the large ones")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    backend, results = args.backend or pick(), []
    for op in args.op or FOLDERS:
        for shape in importlib.import_module(f"scripts.measuring.kernel_shapes.{FOLDERS[op]}").SHAPES:
            chosen = shape.name in args.shape if args.shape else not shape.tested
            if chosen and (result := tune(op, backend, shape, args.rounds)) is not None:
                results.append(result)
    record(results)
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    settings = {"backend": backend, "rounds": args.rounds}
    content = {"script": "scripts/tune_kernels.py", "machine": machine(), "settings": settings, "results": results}
    replace_file(REPOSITORY / f"benchmarks/results/tuning-{kind}.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
