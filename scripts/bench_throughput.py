"""Many requests at once against one at a time: tokens per second over the same 200 requests of mixed lengths.

    python scripts/bench_throughput.py [--model bundled] [--text FILE] [--sizes 8 16 32 64] [--replicas 2]

Prompts are windows of a text, of which some begin alike; lengths, temperatures and truncations are mixed, and end
tokens are not heeded, so that every side writes the same number of tokens. One at a time means a model loaded for one
sequence, which is as fast as one sequence gets. Sides take turns, round by round. Beside each size of at least 16
stand as many sequences in several replicas on one device; beside the largest the same model with a pool too small for
its slots, so that sequences move to the host and back, and with nothing kept of earlier prompts.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.evidence import serving_tables
from et_jax.io.texts import read_text
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, write

TEXT = REPOSITORY / "README.md"
PROMPTS, OUTPUTS = (8, 24, 60, 150, 300), (16, 48, 96, 160)  # tokens
DIVIDED = 16  # sequences at once, from which on replicas are timed beside one
SHARE_ALIKE = 0.3  # of the prompts begin with the text's first tokens


def requests(model: Model, text: str, count: int, seed: int) -> list[GenerationRequest]:
    """Return the mixture."""
    rng = np.random.default_rng(seed)
    tokens = model.tokenizer.encode(text)
    mixed = []
    for number in range(count):
        length, output = int(rng.choice(PROMPTS)), int(rng.choice(OUTPUTS))
        start = 0 if rng.random() < SHARE_ALIKE else int(rng.integers(len(tokens) - length))
        params = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            seed=number,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.9, 1.0])),
            top_k=int(rng.choice([0, 40])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.2])),
        )
        mixed.append(GenerationRequest(prompt=tuple(tokens[start : start + length]), params=params))
    return mixed


def serve(model: Model, asked: list[GenerationRequest], alone: bool) -> dict[str, float]:
    """Serve all of `asked`, one after another where `alone`, from an empty cache; return what it took."""
    model.replicas().forget_prefixes()
    before = vars(model.metrics).copy()
    began = time.perf_counter()
    for part in [[request] for request in asked] if alone else [asked]:
        model.generate(part)
    seconds = time.perf_counter() - began
    gained = {name: getattr(model.metrics, name) - old for name, old in before.items() if name != "finished"}
    return {
        "seconds": seconds,
        "tokens_per_second": gained["generated_tokens"] / seconds,
        "steps": gained["steps"],
        "preemptions": gained["preemptions"],
        "cached_prompt_tokens": gained["cached_prompt_tokens"],
        "prompt_tokens": gained["prompt_tokens"],
        "compiled_late": gained["programs_compiled_late"],
    }


def sides(args: argparse.Namespace) -> dict[str, tuple[Model, bool]]:
    """Return the models to compare, by name, and whether each serves one request after another."""
    longest = max(PROMPTS) + max(OUTPUTS) + 1
    plain = {"dtype": args.dtype, "max_model_len": longest}
    made = {"one at a time": (load(args.model, max_num_seqs=1, **plain), True)}
    for size in args.sizes:
        made[f"{size} at once"] = (load(args.model, max_num_seqs=size, **plain), False)
        if size >= DIVIDED:
            each = size // args.replicas
            shared = load(args.model, max_num_seqs=each, replicas=args.replicas, **plain)
            made[f"{args.replicas} replicas of {each}"] = (shared, False)
    size = args.sizes[-1]
    whole = made[f"{size} at once"][0].decoder_config.num_pages
    made[f"{size} at once, a quarter of the pages"] = (
        load(args.model, max_num_seqs=size, num_pages=whole // 4, **plain),
        False,
    )
    made[f"{size} at once, no prefixes kept"] = (
        load(args.model, max_num_seqs=size, prefix_cache=False, **plain),
        False,
    )
    return made


def main() -> None:
    parser = arguments.parser(__doc__, "model", results="throughput.json")
    parser.add_argument("--text", type=Path, default=TEXT, help="where the prompts are cut from")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sizes", type=arguments.count(), nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--replicas", type=arguments.count(), default=2)
    parser.add_argument("--requests", type=arguments.count(), default=200)
    parser.add_argument("--rounds", type=arguments.count(), default=5)
    args = parser.parse_args()
    try:
        compared = sides(args)
        asked = requests(next(iter(compared.values()))[0], read_text(args.text, "The text"), args.requests, 0)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in compared}
        for number in range(args.rounds + 1):  # the first one warms up and is not counted
            for name, (model, alone) in compared.items():
                taken = serve(model, asked, alone)
                if number:
                    rounds[name].append(taken)
    except (UsageError, OSError) as error:
        sys.exit(str(error))
    rows = [summary(name, taken, rounds["one at a time"]) for name, taken in rounds.items()]
    settings = {name: getattr(value, "name", value) for name, value in vars(args).items() if name != "output"}
    write(args.output, "scripts/bench_throughput.py", settings, rows=rows)
    print(serving_tables.throughput(rows))


def summary(name: str, taken: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians over the rounds, and the median of the rounds' own ratios to `base`."""
    ratios = [each["tokens_per_second"] / plain["tokens_per_second"] for each, plain in zip(taken, base, strict=True)]
    medians = {key: statistics.median(row[key] for row in taken) for key in taken[0]}
    return {"name": name, "ratio": statistics.median(ratios), "ratios": ratios, **medians}


if __name__ == "__main__":
    main()
