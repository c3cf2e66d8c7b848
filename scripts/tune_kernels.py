"""Find the best settings of a kernel for named shapes on the device here, and record those that beat the rule.

For each shape the settings that the rule gives and their neighbours (every number halved, kept or doubled, every
switch both ways) are checked against the definition, then timed in turns, round after round. The one with the least
median time is recorded in `et_jax/pallas/tuned/<device kind>.json` if it beats the rule by more than noise; an entry
that no longer does is taken out. The figures go to `benchmarks/results/tuning-<device kind>.json`.
"""

import dataclasses
import importlib
import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from et_jax.io.files import replace_file
from et_jax.pallas import tuned
from et_jax.pallas.backend import NAMES, pick
from scripts.measuring import arguments
from scripts.measuring.results import RESULTS, write

FOLDERS = {
    "paged_attention": "paged_attention",
    "paged_prefill": "paged_prefill",
    "block_scores": "block_scores",
    "code_scores": "block_scores",
}
NOISE = 0.05  # settings must beat the rule by this share of its time
LEAST_SECONDS = 0.02  # of a timed run, so that what it costs to start one does not count
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings that give the right answer, and a run of them. calls: how many one run makes."""

    config: Any
    run: Callable[[], None]
    calls: int


def module(op: str, backend: str) -> Any:
    """Return an op's module for a backend."""
    return importlib.import_module(f"et_jax.pallas.{FOLDERS[op]}.{backend}")


def _shapes(op: str) -> Any:
    return importlib.import_module(f"scripts.measuring.kernel_shapes.{FOLDERS[op]}")


def named_shapes(op: str, names: list[str]) -> list[Any]:
    """Return the named shapes, or those that are run on an accelerator."""
    shapes = _shapes(op).SHAPES
    return [shape for shape in shapes if (shape.name in names if names else not shape.tested)]


def neighbours(config: Any) -> Iterator[Any]:
    """Yield the configuration itself, then those around it that its class accepts."""
    choices = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            choices.append(list(neighbours(value)))
        elif isinstance(value, bool):
            choices.append([value, not value])
        else:
            choices.append([value, 2 * value, value // 2, 4 * value])
    for values in itertools.product(*choices):
        try:
            yield type(config)(**{f.name: v for f, v in zip(dataclasses.fields(config), values, strict=True)})
        except ValueError:
            continue


def rule_of(kernel: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any]:
    """Return the table's key that a kernel looks up for these arguments, and what its rule gives."""
    seen: list[tuple[str, Any]] = []

    def record(by_rule: Any, name: str, **facts: object) -> Any:
        seen.append((tuned.key(name, **facts), by_rule))
        return by_rule

    kept, tuned.settings = tuned.settings, record
    try:
        jax.eval_shape(lambda arrays: kernel(**arrays), arguments)
    finally:
        tuned.settings = kept
    [found] = seen
    return found


def candidate(kernel: Callable[..., Any], config: Any, arguments: dict[str, Any], wanted: Any) -> Candidate | None:
    """Return the settings, checked and compiled, or None with the reason printed."""
    dtype = str(arguments["q"].dtype)
    try:
        got = jax.jit(lambda arrays: kernel(**arrays, config=config))(arguments)
    except Exception as reason:  # each compiler has its own
        print(f"  {config}: refused, {str(reason).splitlines()[0][:160]}")
        return None
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        close = partial(np.testing.assert_allclose, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        try:
            close(np.asarray(ours, np.float64), np.asarray(theirs, np.float64))
        except AssertionError:
            print(f"  {config}: WRONG, not timed")
            return None

    def timed(calls: int) -> Callable[[], None]:
        def chain(arrays: dict[str, Any]) -> Any:
            def call(_: Any, query: Any) -> Any:
                # the next call waits for all of this one's first result
                first = jax.tree.leaves(kernel(**(arrays | {"q": query}), config=config))[0]
                return query + (0.0 * first.max()).astype(query.dtype)

            return lax.fori_loop(0, calls, call, arrays["q"])

        program = jax.jit(chain).lower(arguments).compile()
        return lambda: program(arguments).block_until_ready()

    once = timed(1)
    once()
    began = time.perf_counter()
    once()
    calls = max(1, round(LEAST_SECONDS / (time.perf_counter() - began)))
    return Candidate(config=config, run=once if calls == 1 else timed(calls), calls=calls)


def measure(candidates: list[Candidate], rounds: int) -> np.ndarray:
    """Return milliseconds a call, "candidate round", each round all in turn."""
    times = np.zeros((len(candidates), rounds))
    for entry in candidates:
        entry.run()
    for i in range(rounds):
        for j, entry in enumerate(candidates):
            began = time.perf_counter()
            entry.run()
            times[j, i] = (time.perf_counter() - began) / entry.calls * 1e3
    return times


def tune(op: str, backend: str, shape: Any, rounds: int) -> dict[str, Any] | None:
    """Return the key of a shape, the rule's settings, the best ones, and their figures; None where it is refused."""
    kernel = partial(getattr(module(op, backend), op), **shape.settings)
    taken = inspect.signature(kernel).parameters
    arguments = {name: x for name, x in _shapes(op).example(shape).items() if name in taken and x is not None}
    print(f"{op}/{backend} {shape.name}")
    try:
        key, by_rule = rule_of(kernel, arguments)
    except NotImplementedError as reason:
        print(f"  {reason}")
        return None
    definition = partial(getattr(module(op, "reference"), op), **shape.settings)
    wanted = jax.jit(lambda arrays: definition(**arrays))(arguments)
    found = [candidate(kernel, config, arguments, wanted) for config in dict.fromkeys(neighbours(by_rule))]
    candidates = [entry for entry in found if entry is not None]
    if not candidates or candidates[0].config != by_rule:
        print("  the rule's own settings failed: nothing to compare with")
        return None
    times = measure(candidates, rounds)
    ratios = np.median(times / times[0], axis=1)
    best = int(np.argmin(ratios))
    for entry, ms, ratio in zip(candidates, np.median(times, axis=1), ratios, strict=True):
        print(f"  {ms:9.3f} ms {ratio:6.3f} of the rule  {entry.config}")
    return {
        "shape": shape.name,
        "key": key,
        "by_rule": dataclasses.asdict(by_rule),
        "best": dataclasses.asdict(candidates[best].config),
        "median_ms": float(np.median(times[best])),
        "ratio": float(ratios[best]),
    }


def record(results: list[dict[str, Any]]) -> None:
    """Put the settings that beat the rule into this device's table, and take out those that no longer do."""
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
    parser = arguments.parser(__doc__)
    parser.add_argument("--op", choices=FOLDERS, action="append", help="an op, or several; all by default")
    parser.add_argument("--backend", choices=NAMES, help="by default the best for this device")
    parser.add_argument("--shape", action="append", default=[], help="a name, or several; by default the large ones")
    parser.add_argument("--rounds", type=arguments.count(), default=15)
    args = parser.parse_args()
    backend = args.backend or pick()
    results = []
    for op in args.op or FOLDERS:
        for shape in named_shapes(op, args.shape):
            if (result := tune(op, backend, shape, args.rounds)) is not None:
                results.append(result)
    record(results)
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    settings = {"backend": backend, "rounds": args.rounds}
    write(RESULTS / f"tuning-{kind}.json", "scripts/tune_kernels.py", settings, results=results)


if __name__ == "__main__":
    main()
