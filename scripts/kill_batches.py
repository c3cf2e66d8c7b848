"""Kill a batch job again and again: in the end every line has one row, the row of an undisturbed run.

    python scripts/kill_batches.py [--kills 100] [--lines 300] [--replicas 2] [--num-pages 24] [--seed 0]
        [--draft lookup]

A job of mixed lines (texts and token ids, several continuations, stop strings, log-probabilities, lines that are
refused) runs once undisturbed. The same job then runs on another output and is killed with SIGKILL, SIGTERM or SIGINT:
some runs while they start, by the clock, the others once a random number of rows is there, from the first to the last.
After some kills the last row is torn by hand, since a kill seldom falls inside a write. Pages are few, so that
sequences are moved to the host and back. The figures are written as JSON; whatever is not as it must be ends the script
with a sentence and exit code 1.
"""

import collections
import dataclasses
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
from scripts.measuring.results import write

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STARTING = 0.3  # share of the kills that fall by the clock, while a run starts
TORN = 0.3  # share of the kills after which the last row is torn
PREEMPTIONS = "et_jax_preemptions_total"
STARTING_UP = "_get_module_details"  # a frame of the interpreter, which looks for the package and has not begun it
PATIENCE = 300.0  # seconds that any one run may take


class Broken(Exception):
    """Something is not as it must be after a kill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One command on one input; `arguments` are those of every run."""

    source: Path
    arguments: tuple[str, ...]

    def start(self, output: Path, *more: str) -> subprocess.Popen[str]:
        files = "-i", str(self.source), "-o", str(output)
        command = [sys.executable, "-m", "et_jax.generate", *files, *self.arguments, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, output: Path, *more: str) -> float:
        """Run to the end; return the seconds until the first row was there."""
        began = time.monotonic()
        process = self.start(output, *more)
        while num_rows(output) == 0 and process.poll() is None:
            time.sleep(0.01)
        first = time.monotonic() - began
        said = process.communicate(timeout=PATIENCE)[1]
        if process.returncode != 0:
            raise Broken(f"an undisturbed run ended with code {process.returncode}: {said[-500:]}")
        return first


def lines(count: int) -> list[dict[str, Any]]:
    """Return the mixture, every line with a name and a seed of its own; one in 25 is refused."""

    def line(i: int) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": f"It was the {i}th", "max_tokens": 8 + 4 * (i % 23), "seed": i}
        if i % 3 == 0:
            body |= {"prompt": [1 + (7 * i + j) % 400 for j in range(2 + i % 90)]}
        if i % 4 == 1:
            body |= {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.3}
        if i % 5 == 2:
            body |= {"n": 2, "stop": [".", "the "]}
        if i % 7 == 3:
            body |= {"logprobs": 3}
        if i % 25 == 24:
            body |= {"temperature": "warm"}
        envelope = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        return envelope if i % 2 else {"id": f"p{i}", **body}

    return [line(i) for i in range(count)]


def names(asked: list[dict[str, Any]]) -> set[str]:
    """Return the name of every line."""
    return {line.get("custom_id") or line["id"] for line in asked}


def rows(output: Path) -> dict[str, Any]:
    """Return what every row says that no kill may change, by name. Raises Broken for a name that comes twice."""
    found: dict[str, Any] = {}
    for text in output.read_bytes().splitlines():
        row = json.loads(text)
        if row["custom_id"] in found:
            raise Broken(f"{row['custom_id']} has two rows")
        body = None if row["response"] is None else row["response"]["body"]
        answer = None if body is None else (body["choices"], body["usage"], body["entropic"]["entropic_time"])
        found[row["custom_id"]] = row["id"], answer, row["error"]
    return found


def num_rows(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def preemptions(metrics: Path) -> int:
    """Return how often a sequence was moved to the host, by the counters of a run."""
    [count] = [line.split()[1] for line in metrics.read_text().splitlines() if line.startswith(PREEMPTIONS + " ")]
    return int(count)


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
    whole = output.read_bytes() if output.exists() else b""
    if not whole.endswith(b"\n"):
        return False
    last = whole.splitlines()[-1]
    with output.open("ab") as file:
        file.write(last[: draw.randrange(1, len(last))])
    return True


def disturb(job: Job, output: Path, count: int, kills: int, startup: float, draw: random.Random) -> dict[str, Any]:
    """Kill the job `kills` times; return what was sent, what came back, and how many rows were there."""
    ended: collections.Counter[str] = collections.Counter()
    at_rows, torn, finished = [], 0, 0
    by_clock = [draw.random() < STARTING for _ in range(kills)]
    points = iter(sorted(draw.sample(range(count), by_clock.count(False))))
    for number, early in enumerate(by_clock, 1):
        chosen = draw.choice(SIGNALS)
        process = job.start(output)
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
    """Raise Broken unless both outputs hold every name, with equal rows."""
    if calm.keys() != expected or wild.keys() != expected:
        raise Broken(f"{len(expected - wild.keys())} lines have no row, {len(wild.keys() - expected)} rows no line")
    differing = sorted(name for name in expected if calm[name] != wild[name])
    if differing:
        raise Broken(f"{len(differing)} rows differ from an undisturbed run: {', '.join(differing[:10])}")


def main() -> None:
    parser = arguments.parser(__doc__, "model", results="kills.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--num-pages", type=int, default=24)
    parser.add_argument("--draft", help="a drafter, see et_jax.generate; none by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, began = random.Random(args.seed), time.monotonic()
    asked = lines(args.lines)
    with tempfile.TemporaryDirectory() as folder:
        source, calm, wild = (Path(folder) / name for name in ("in.jsonl", "calm.jsonl", "wild.jsonl"))
        metrics = Path(folder) / "metrics.txt"
        source.write_text("".join(json.dumps(line) + "\n" for line in asked), encoding="utf-8")
        sizes = ("--replicas", str(args.replicas), "--num-pages", str(args.num_pages), "--max-model-len", "256")
        drafts = () if args.draft is None else ("--draft", args.draft)
        job = Job(source=source, arguments=("--model", args.model, *sizes, *drafts))
        try:
            job.finish(calm.with_name("first.jsonl"))  # compiles every program, for those to come
            startup = job.finish(calm, "--metrics", str(metrics))
            found = disturb(job, wild, args.lines, args.kills, startup, draw)
            job.finish(wild)
            compare(rows(calm), rows(wild), names(asked))
        except Broken as error:
            sys.exit(f"{error}.")
        moved = preemptions(metrics)
    results = found | {
        "equal_rows": args.lines,
        "preemptions_undisturbed": moved,
        "seconds": round(time.monotonic() - began, 1),
    }
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    write(args.output, "scripts/kill_batches.py", settings, **results)
    print(f"{args.kills} kills {found['ended']}, {found['torn']} rows torn: every id once, {args.lines} rows equal")


if __name__ == "__main__":
    main()
