"""Is the cache updated in place? The time and the temporary memory of a step, against the size of the page pool.

A step that copied its pool would need the pool's size in temporaries and take time that grows with it.
Pools take turns, round after round; medians are printed and written as JSON.
"""

import json
import platform
import time
from pathlib import Path

import jax
import numpy as np

from et_jax.decode.request import request
from et_jax.io.files import replace_file
from et_jax.models.weights import num_bytes
from et_jax.serve.engine import load
from scripts.measuring import arguments


def measure(model_name: str, pools: list[int], rounds: int, steps: int) -> list[dict[str, float]]:
    """Return, per pool, its bytes, the step's temporary and aliased bytes, and the median milliseconds of a step."""
    cases = []
    for num_pages in pools:
        model = load(model_name, num_pages=num_pages, max_num_seqs=2)
        d = model.decoder()
        state = d.insert(d.empty(), 0, request(d.config, [1], limit=model.max_model_len - 1))
        program = d.step.lower(model.weights, state).compile()
        cases.append((model, program, state))
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for i, (model, program, state) in enumerate(cases):
            began = time.perf_counter()
            for _ in range(steps):
                state, output = program(model.weights, state)
            jax.block_until_ready(output.token)
            times[i].append((time.perf_counter() - began) / steps * 1e3)
            cases[i] = (model, program, state)
    rows = []
    for (_, program, state), taken in zip(cases, times, strict=True):
        memory = program.memory_analysis()
        rows.append(
            {
                "num_pages": int(state.table.references.shape[0]),
                "pool_bytes": num_bytes(state.plants[0].cache),
                "temporary_bytes": memory.temp_size_in_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "median_ms": float(np.median(taken)),
            }
        )
    return rows


def main() -> None:
    parser = arguments.parser(__doc__, "model")
    parser.add_argument(
        "--pools", type=arguments.count(), nargs="+", default=[200, 2_000, 20_000], help="pages of each pool"
    )
    parser.add_argument("--rounds", type=arguments.count(), default=15)
    parser.add_argument("--steps", type=arguments.count(), default=10, help="steps timed in one go")
    parser.add_argument("--output", type=arguments.output, default=Path("benchmarks/results/pool.json"))
    args = parser.parse_args()
    rows = measure(args.model, args.pools, args.rounds, args.steps)
    print(f"{'pages':>8} {'pool MB':>9} {'temporary MB':>13} {'aliased MB':>11} {'ms a step':>10}")
    for row in rows:
        sizes = [row[name] / 1e6 for name in ("pool_bytes", "temporary_bytes", "aliased_bytes")]
        print(f"{row['num_pages']:>8} {sizes[0]:>9.1f} {sizes[1]:>13.2f} {sizes[2]:>11.1f} {row['median_ms']:>10.3f}")
    result = {
        "script": "scripts/bench_pool.py",
        "machine": platform.processor() or platform.machine(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": args.model,
        "rounds": args.rounds,
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(args.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
