"""Tokens per second of et_jax, llama.cpp and Hugging Face transformers: one model, one machine, turn by turn.

    python scripts/bench_peers.py --llama-python A/bin/python --transformers-python B/bin/python

A is an environment with llama-cpp-python and gguf, B one with torch and transformers. The model is random weights in
the shape of SmolLM-135M, rounded to bfloat16. Each engine holds them in the forms that it has, every form in a process
of its own (`scripts/peers/worker.py`), and all take turns: greedy, end tokens ignored, the same prompts (token ids),
the same number of new tokens. et_jax runs what `Model.stream` runs, text and trace of every token included. Ratios are
taken turn by turn. That all run one model is seen in float32, where their greedy tokens must agree from the start.
Nothing is asserted about time.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from et_jax.evidence import serving_tables
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.transformer import initialise
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import SMOLLM_135M

WORKER = Path(__file__).with_name("peers") / "worker.py"
FORMS = {
    "et_jax": ("bfloat16", "int8"),
    "llama.cpp": ("bfloat16", "Q8_0"),
    "transformers": ("bfloat16", "float32"),
}
NEEDS = {"llama.cpp": "llama_cpp, gguf", "transformers": "torch, transformers"}
INSTALLED_AS = {"llama.cpp": "llama-cpp-python gguf", "transformers": "torch transformers"}
PAUSE = 0.3  # seconds between turns, in which the threads of the engine that ran go to sleep
AGREEING = 16  # tokens of each of two prompts that are compared in float32


class Worker:
    """A worker process, seen by the one who asks."""

    def __init__(self, engine: str, python: str) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [python, str(WORKER.resolve()), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, do: str, **request: Any) -> Any:
        """Return the answer; ends the run with one sentence where it is an error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do} | request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        if "error" in answer:
            sys.exit(f"{self.engine}: {answer['error']}")
        return answer

    def generate(self, prompts: list[list[int]], tokens: int) -> Any:
        """Return what a turn took, and its tokens."""
        time.sleep(PAUSE)
        return self.ask("generate", prompts=prompts, tokens=tokens)

    def end(self) -> None:
        """Have it end, and wait until it has."""
        self._process.communicate()


def drawn(batch: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [draw.choices(range(SMOLLM_135M.vocab_size), k=length) for _ in range(batch)]


def agreement(workers: Sequence[Worker], model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how many greedy tokens of et_jax's each peer says too in float32, from the start of two texts on."""
    ids: dict[str, list[list[int]]] = {}
    for worker in workers:
        worker.ask("load", model=model, form="float32", batch=2, length=args.prompt_tokens + AGREEING)
        ids[worker.engine] = worker.generate(drawn(2, args.prompt_tokens, 0), AGREEING)["ids"]
    ours = ids.pop("et_jax")
    found = []
    for engine, theirs in ids.items():
        equal = [num_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
        found.append({"engine": engine, "least": min(equal), "together": sum(equal), "tokens": sum(map(len, ours))})
    return found


def num_equal(ours: list[int], theirs: list[int]) -> int:
    """Return how many tokens agree from the start."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def measured(workers: dict[tuple[str, str], Worker], model: str, batch: int, args: argparse.Namespace) -> dict:
    """Return what every engine took in every form, in turns, and how et_jax's compare with the others'."""
    for (_, form), worker in workers.items():
        worker.ask("load", model=model, form=form, batch=batch, length=args.prompt_tokens + args.tokens)
        worker.generate(drawn(batch, args.prompt_tokens, 0), args.tokens)  # compilers and caches
    rounds = [
        [worker.generate(drawn(batch, args.prompt_tokens, seed), args.tokens) for worker in workers.values()]
        for seed in range(1, args.rounds + 1)
    ]
    seconds = {way: [turn[i]["seconds"] for turn in rounds] for i, way in enumerate(workers)}
    firsts = {way: [turn[i]["first"] for turn in rounds] for i, way in enumerate(workers)}
    ways = []
    for way, taken in seconds.items():
        steps = [(args.tokens - 1) / (whole - first) for whole, first in zip(taken, firsts[way], strict=True)]
        over = {}
        for form in FORMS["et_jax"]:
            ratios = [theirs / ours for theirs, ours in zip(taken, seconds["et_jax", form], strict=True)]
            over[form] = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rates = [batch * args.tokens / one for one in taken]
        ways.append(
            {
                "engine": way[0],
                "form": way[1],
                "tokens_per_second": statistics.median(rates),
                "slowest": min(rates),
                "fastest": max(rates),
                "steps_per_second": statistics.median(steps),
                "first_token_seconds": statistics.median(firsts[way]),
                "et_jax_over_it": over,
            }
        )
    return {"batch": batch, "ways": ways}


def random_model(folder: Path) -> str:
    """Return the folder of the random model, written on first use, with a tokenizer of one word per id."""
    folder = folder.expanduser() / "random-smollm-135m"
    if not (folder / "tokenizer.json").exists():
        write_hugging_face(folder, SMOLLM_135M, initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16))
        words = {f"w{id}": id for id in range(SMOLLM_135M.vocab_size)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def refuse_without(engine: str, python: str) -> None:
    """End with one sentence unless `python` is a Python that has an engine."""
    try:
        found = subprocess.run([python, "-c", f"import {NEEDS[engine]}"], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"bench_peers: {python} cannot be run ({error.strerror}); name a Python that has {engine}.")
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"bench_peers: {python} lacks {engine} ({reason}); there, pip install {INSTALLED_AS[engine]}.")


def main() -> None:
    """Measure every batch, print the tables and write the figures."""
    parser = arguments.parser(__doc__, results="peers.json")
    count = arguments.count()
    parser.add_argument("--llama-python", required=True, help="a Python that has llama-cpp-python and gguf")
    parser.add_argument("--transformers-python", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 4, 16], help="sequences at once (default 1 4 16)")
    parser.add_argument("--tokens", type=arguments.count(2), default=64, help="new ones of each sequence (default 64)")
    parser.add_argument("--prompt-tokens", type=count, default=32, help="tokens of each prompt (default 32)")
    parser.add_argument("--rounds", type=count, default=5, help="turns of every engine and form (default 5)")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/et_jax/bench"), help="where the random model lies")
    args = parser.parse_args()
    pythons = {"et_jax": sys.executable, "llama.cpp": args.llama_python, "transformers": args.transformers_python}
    for engine in NEEDS:
        refuse_without(engine, pythons[engine])
    model, load = random_model(args.cache), round(os.getloadavg()[0], 2)
    workers = {(engine, form): Worker(engine, pythons[engine]) for engine, forms in FORMS.items() for form in forms}
    versions = {engine: worker.ask("versions") for (engine, _), worker in workers.items()}
    print(json.dumps(versions), flush=True)
    agreed = agreement([workers[engine, forms[0]] for engine, forms in FORMS.items()], model, args)
    cases = []
    for batch in args.batch:
        cases.append(measured(workers, model, batch, args))
        print(serving_tables.peers(cases[-1:], agreed), flush=True)
    for worker in workers.values():
        worker.end()
    settings = {name: getattr(args, name) for name in ("tokens", "prompt_tokens", "rounds")}
    settings |= {"cores_used": len(os.sched_getaffinity(0)), "load_average_before": load}
    write(args.output, "scripts/bench_peers.py", settings, versions=versions, agreement=agreed, cases=cases)
    if any(one["least"] == 0 for one in agreed):
        sys.exit("bench_peers: an engine says another first token in float32: it does not run the same model.")


if __name__ == "__main__":
    main()
