"""Two versions of the package, tokens a second of each, by turns: this checkout and the one named.

    python scripts/bench_versions.py FOLDER [--model bundled 135M] [--rows 2 16] [--rounds 7] [--alone 0 1800]

Every version serves the same requests in a process of its own, and waits while another does. Each case is a model, a
control and a number of sequences at once. With `--alone` above 0 it is one sequence in an engine with room for so many,
which goes on from a prompt of so many tokens that the engine has kept. Before it is timed each process serves for
`--settle` seconds, for programs for few sequences are made once some have been served. Medians are of the rounds, the
ratio is the median of the rounds' own.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import et_jax

CASES: dict[str, dict[str, Any]] = {
    "off": {"control": "off"},
    "guarded": {"control": "guarded"},
    "certified": {"control": "certified"},
    "lookup": {"control": "off", "draft": "lookup"},
}
MODELS = ("bundled", "135M")
PROMPT = "It was late in the autumn when the letter came, and nobody in the house would say from whom it was. "


def serve(model: str, rows: int, case: str, alone: int, settle: float) -> None:
    """Serve the requests of a case once for every line of the standard input, and print the tokens a second."""
    tokens = 192 if model == "bundled" and not alone else 48
    room = alone + 2 * tokens if alone else 512
    loaded = et_jax.load(model, max_num_seqs=rows, max_model_len=room, **CASES[case])
    prompts = [f"{PROMPT}The {number}th" for number in range(2 * rows)]
    if alone:
        words = loaded.tokenizer.encode(PROMPT)
        prompts = [(words * -(-alone // len(words)))[:alone]]
    settings: dict[str, Any] = {"max_tokens": tokens, "seed": 1, "ignore_eos": True}
    until = time.perf_counter() + settle
    while time.perf_counter() < until:
        loaded.generate(prompts, **settings)
    for _ in itertools.chain([None], sys.stdin):  # the first, which compiles, is not asked for
        began = time.perf_counter()
        loaded.generate(prompts, **settings)
        print(json.dumps({"tokens_per_second": len(prompts) * tokens / (time.perf_counter() - began)}), flush=True)


class Version:
    """A process that serves one case of a checkout when it is told to."""

    def __init__(self, checkout: Path, *what: str) -> None:
        command = [sys.executable, __file__, "--serve", *what]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def answer(self) -> float:
        """Return the tokens a second of the next line. Where the process ended, having said why, so does this one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"The process that serves ended with {self.process.wait()}; above it says why.")
        return json.loads(line)["tokens_per_second"]

    def run(self) -> float:
        """Have it serve once, and return its tokens a second."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def compared(checkouts: list[Path], rounds: int, *what: str) -> dict[str, Any]:
    """Return the medians of both versions, and of their ratio, the newer over the older."""
    versions = [Version(checkout, *what) for checkout in checkouts]
    taken = [[version.run() for version in versions] for _ in range(rounds)]
    for version in versions:
        version.end()
    before, now = (statistics.median(each) for each in zip(*taken, strict=True))
    return {"before": before, "now": now, "ratio": statistics.median(new / old for old, new in taken), "rounds": taken}


def main() -> None:
    """Measure, print a table, and keep the figures."""
    # here, for the processes that serve have an older version, of which they ask no more than `et_jax.load`
    from scripts.measuring import arguments
    from scripts.measuring.random_folder import random_folder
    from scripts.measuring.results import REPOSITORY, RESULTS, table, write
    from scripts.measuring.shapes import SMOLLM_135M

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=arguments.checkout, help="a checkout of the older version")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="135M: of random weights")
    parser.add_argument("--rows", type=arguments.count(2), nargs="+", default=[2, 16], help="sequences at once")
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], help="controls (default all)")
    parser.add_argument("--alone", type=arguments.count(0), nargs="+", default=[0], help="tokens of the one prompt")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds of serving before (default 0)")
    parser.add_argument("--rounds", type=arguments.count(), default=7)
    parser.add_argument("--output", type=arguments.output, default=RESULTS / "versions.json", help="a JSON file")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        longest = max(SMOLLM_135M.max_positions, 2 * max(args.alone))  # the rotation of positions knows no end
        shape = dataclasses.replace(SMOLLM_135M, max_positions=longest)
        models = {"bundled": "bundled", "135M": str(random_folder(Path(folder), shape, "bfloat16"))}
        for name, rows, case, alone in itertools.product(args.model, args.rows, args.case, args.alone):
            what = models[name], str(rows), case, str(alone), str(args.settle)
            figures = compared([args.checkout.resolve(), REPOSITORY], args.rounds, *what)
            found.append({"model": name, "rows": rows, "case": case, "alone": alone} | figures)
            print(found[-1], flush=True)
    settings = {"rounds": args.rounds, "settle": args.settle}
    write(args.output, "scripts/bench_versions.py", settings, versions=found)
    header = ["model", "rows", "case", "alone", "before", "now", "ratio"]
    print(table(header, [[row[key] for key in header] for row in found]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
    else:
        main()
