"""Kill a batch job again and again: in the end every line has one row, the row of an undisturbed run.

    python -m scripts.kill_batches [--kills 100] [--lines 300] [--replicas 2] [--num-pages 24] [--seed 0]
        [--draft lookup]

A job of mixed lines (texts and token ids, several continuations, stop strings, log-probabilities, lines that are
refused) runs once undisturbed. The same job then runs on another output and is killed with SIGKILL, SIGTERM or SIGINT:
some runs while they start, by the clock, the others once a random number of rows is there, from the first to the last.
After some kills the last row is torn by hand, since a kill seldom falls inside a write. Pages are few, so that
sequences are moved to the host and back. The figures are written as JSON; a fault ends the script with a sentence and
exit code 1.
"""

import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.measuring import arguments
from scripts.measuring.results import RESULTS, write

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STARTING = 0.3  # share of the kills that fall by the clock, while a run starts
TORN = 0.3  # share of the kills after which the last row is torn
STARTING_UP = "_get_module_details"  # a frame of the interpreter, which looks for the package and has not begun it
PATIENCE = 300.0  # seconds that any one run may take


class Broken(Exception):
    """A kill did harm."""


def lines(count: int) -> dict[str, dict[str, Any]]:
    """Return the mixture by name, every line with a seed of its own; one in 25 is refused."""

    def body(i: int) -> dict[str, Any]:
        line: dict[str, Any] = {"prompt": f"It was the {i}th", "max_tokens": 8 + 4 * (i % 23), "seed": i}
        line |= {"prompt": [1 + (7 * i + j) % 400 for j in range(2 + i % 90)]} if i % 3 == 0 else {}
        line |= {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.3} if i % 4 == 1 else {}
        line |= {"n": 2, "stop": [".", "the "]} if i % 5 == 2 else {}
        line |= {"logprobs": 3} if i % 7 == 3 else {}
        return line | ({"temperature": "warm"} if i % 25 == 24 else {})

    def line(i: int) -> dict[str, Any]:
        envelope = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions"}
        return envelope | {"body": body(i)} if i % 2 else {"id": f"p{i}"} | body(i)

    return {f"{'pc'[i % 2]}{i}": line(i) for i in range(count)}


def rows(output: Path) -> dict[str, Any]:
    """Return what no kill may change of every row, by name. Raises Broken for a name that comes twice."""
    found: dict[str, Any] = {}
    for row in map(json.loads, output.read_bytes().splitlines()):
        if row["custom_id"] in found:
            raise Broken(f"{row['custom_id']} has two rows")
        body = None if row["response"] is None else row["response"]["body"]
        answer = None if body is None else (body["choices"], body["usage"], body["entropic"]["entropic_time"])
        found[row["custom_id"]] = row["id"], answer, row["error"]
    return found


def num_rows(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def kill(process: subprocess.Popen[str], chosen: signal.Signals) -> int:
    """Send the signal and return the exit code. Raises Broken where a run does not end, or ends in a traceback."""
    process.send_signal(chosen)
    try:
        said = process.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise Broken(f"a run went on for 60 seconds after {chosen.name}") from error
    if "Traceback" in said and "et_jax" in said and STARTING_UP not in said:
        raise Broken(f"a run ended in a traceback after {chosen.name}: {said[-1000:]}")
    return process.returncode


def tear(output: Path, draw: random.Random) -> bool:
    """Leave the beginning of a row at the end of the output, as a kill within a write does."""
    data = output.read_bytes() if output.exists() else b""
    if not data.endswith(b"\n"):
        return False
    last = data.splitlines()[-1]
    output.write_bytes(data + last[: draw.randrange(1, len(last))])
    return True


class Job:
    """One command on one input; `more` are arguments of every run."""

    def __init__(self, source: Path, more: list[str]) -> None:
        self._command = [sys.executable, "-m", "et_jax.generate", "-i", str(source), *more]

    def start(self, output: Path, *more: str) -> subprocess.Popen[str]:
        command = [*self._command, "-o", str(output), *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, output: Path, *more: str) -> float:
        """Run to the end; return the seconds until the first row."""
        began, process = time.monotonic(), self.start(output, *more)
        while num_rows(output) == 0 and process.poll() is None:
            time.sleep(0.01)
        first = time.monotonic() - began
        said = process.communicate(timeout=PATIENCE)[1]
        if process.returncode != 0:
            raise Broken(f"an undisturbed run ended with code {process.returncode}: {said[-500:]}")
        return first


def disturb(job: Job, output: Path, count: int, kills: int, startup: float, draw: random.Random) -> dict[str, Any]:
    """Kill the job `kills` times; return the signals with the exit codes, and the rows at each kill."""
    ended: collections.Counter[str] = collections.Counter()
    at_rows, torn, finished = [], 0, 0
    by_clock = [draw.random() < STARTING for _ in range(kills)]
    points = iter(sorted(draw.sample(range(count), by_clock.count(False))))
    for number, early in enumerate(by_clock, 1):
        chosen, process = draw.choice(SIGNALS), job.start(output)
        if early:
            time.sleep(draw.uniform(0.0, startup))
        else:
            at, deadline = next(points), time.monotonic() + PATIENCE
            while num_rows(output) <= at and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.05))
        over = process.poll() is not None
        code = kill(process, chosen)
        finished += over
        ended[f"{chosen.name} {'after the end' if over else code}"] += 1
        at_rows.append(num_rows(output))
        for text in output.read_bytes().split(b"\n")[:-1] if output.exists() else []:
            json.loads(text)
        if not over and draw.random() < TORN:
            torn += tear(output, draw)
        print(f"{number} of {kills}: {chosen.name}, exit code {code}, {at_rows[-1]} rows", file=sys.stderr, flush=True)
    return {"ended": dict(sorted(ended.items())), "rows_at_kills": at_rows, "torn": torn, "after_the_end": finished}


def compare(calm: dict[str, Any], wild: dict[str, Any], expected: set[str]) -> None:
    """Raise Broken unless both outputs have every name, with equal rows."""
    if calm.keys() != expected or wild.keys() != expected:
        raise Broken(f"{len(expected - wild.keys())} lines have no row, {len(wild.keys() - expected)} rows no line")
    differing = sorted(name for name in expected if calm[name] != wild[name])
    if differing:
        raise Broken(f"{len(differing)} rows differ from an undisturbed run: {', '.join(differing[:10])}")


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--output", type=arguments.output, default=RESULTS / "kills.json")
    parser.add_argument("--seed", type=arguments.count(0), default=0)
    for name, default in {"kills": 100, "lines": 300, "replicas": 2, "num-pages": 24}.items():
        parser.add_argument(f"--{name}", type=arguments.count(), default=default)
    parser.add_argument("--draft", help="a drafter, see et_jax.generate; none by default")
    args = parser.parse_args()
    began, asked = time.monotonic(), lines(args.lines)
    sizes = {"model": args.model, "replicas": args.replicas, "num-pages": args.num_pages, "max-model-len": 256}
    given = [f"--{name}={value}" for name, value in (sizes | ({"draft": args.draft} if args.draft else {})).items()]
    with tempfile.TemporaryDirectory() as folder:
        source, first, calm, wild, metrics = (
            Path(folder) / name for name in ("in", "first", "calm", "wild", "metrics")
        )
        source.write_text("".join(json.dumps(line) + "\n" for line in asked.values()), encoding="utf-8")
        job = Job(source, given)
        try:
            job.finish(first)  # compiles every program, for those to come
            startup = job.finish(calm, "--metrics", str(metrics))
            found = disturb(job, wild, args.lines, args.kills, startup, random.Random(args.seed))
            job.finish(wild)
            compare(rows(calm), rows(wild), set(asked))
        except Broken as error:
            sys.exit(f"{error}.")
        [moved] = [line for line in metrics.read_text().splitlines() if line.startswith("et_jax_preemptions_total ")]
    found |= {"equal_rows": args.lines, "preemptions_undisturbed": int(moved.split()[1])}
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    write(args.output, "scripts/kill_batches.py", settings, **found, seconds=round(time.monotonic() - began, 1))
    print(f"{args.kills} kills {found['ended']}, {found['torn']} rows torn: every id once, {args.lines} rows equal")


if __name__ == "__main__":
    main()
