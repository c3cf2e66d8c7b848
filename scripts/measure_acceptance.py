"""How often a small model's drafts are accepted, and whether its entropy says when to stop drafting.

    python scripts/measure_acceptance.py --text novels NOVELS.tar.xz --text shakespeare input.txt

Two models of one tokenizer read the same tokens. A tar archive gives the works held out from the bundled model's
training, any other file is one text; tasks with their answers come beside them. Part one, on the second half of rows of
every text: the share of positions at which a drafted token is accepted (`et_jax.evidence.coupling`). Part two: the
model writes texts from prompts of the first text, greedily and sampled, and drafts of them are as long as laws of
lengths say (`et_jax.evidence.walks`). Part three: either model drafts for itself after prompts of every text, by
the share of blocks that its drafts read and their length. Part four: texts of either model after such prompts, read
again as a draft's first token is, by what that reads; and laws of lengths walked along them. One part alone, `--part`,
leaves the figures of the others as they are. Nothing is asserted.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.evidence import draft_tables
from et_jax.evidence.coupling import acceptance
from et_jax.evidence.own_drafts import READERS, drafted
from et_jax.evidence.walks import CIRCLE, ROW_COST, lengths, written
from et_jax.io.texts import read_text
from et_jax.serve.engine import load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.tasks.asking import counter, grid
from et_jax.tasks.generators import TASKS
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring.results import write
from scripts.measuring.text import cut, held_out_logits, in_a_circle, texts

TEMPERATURES = (0.4, 0.7, 1.0)
WRITTEN_AT = (0.0, 0.7)  # temperatures of the texts that the model writes
LENGTH = 200  # tokens of a prompt, and of the text after it
PARTS = ("models", "lengths", "self", "readers")
SHARES, DRAFTED = (0.04, 0.08, 0.15), (2, 4, 8)  # of blocks read, and tokens drafted in a step
SELF_PROMPT, SELF_TEXT, SELF_PROMPTS = 1800, 120, 3  # tokens, and prompts of every text


def works(path: Path) -> list[str]:
    """Return the held-out works of a tar archive, or any other file as one text."""
    return texts(path) if ".tar" in path.suffixes else [read_text(path, "The text")]


def of_itself(name: str, sources: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return how often a model's own drafts are accepted, by text, share read, length and temperature."""
    found = []
    for share in SHARES:
        model = load(
            name, max_num_seqs=1, draft="self", draft_share=share, draft_tokens=DRAFTED[-1], draft_length="fixed"
        )
        for text, parts in sources.items():
            prompts = cut(model, text, parts, SELF_PROMPTS, SELF_PROMPT).tolist()
            for most, temperature in itertools.product(DRAFTED, WRITTEN_AT):
                params = SamplingParams(max_tokens=SELF_TEXT, temperature=temperature, ignore_eos=True)
                asked = [GenerationRequest(prompt=tuple(one), params=params, draft_tokens=most) for one in prompts]
                rows = [row for one in model.generate(asked) for row in one.trace]
                drafted, accepted = (sum(getattr(row, what) for row in rows) for what in ("drafted", "accepted"))
                steps = sum(not row.accepted for row in rows)
                about = {"model": name, "text": text, "share": share, "length": most, "temperature": temperature}
                found.append(about | {"drafted": drafted, "accepted": accepted, "tokens_per_step": len(rows) / steps})
                print(found[-1], flush=True)
        model.close()
    return found


def of_readers(
    name: str, sources: dict[str, list[str]], prompts: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return how often a draft's first token holds by what it reads, and what laws of lengths spend along the texts."""
    model = load(name, dtype="float32")
    built, *others = READERS
    readers = [(built, share) for share in SHARES] + [(other, SHARES[1]) for other in others]
    held, walked = [], []
    rng = np.random.default_rng(0)
    for (text, parts), temperature in itertools.product(sources.items(), WRITTEN_AT):
        before = cut(model, text, parts, prompts, SELF_PROMPT)
        params = SamplingParams(max_tokens=SELF_TEXT, temperature=temperature, ignore_eos=True)
        asked = [
            GenerationRequest(prompt=tuple(one.tolist()), params=replace(params, seed=seed))
            for seed, one in enumerate(before)
        ]
        after = [one.token_ids for one in model.generate(asked)]
        rows = np.concatenate([before, np.array(after, np.int32)], axis=1)
        found = drafted(model, rows, SELF_PROMPT, temperature, readers)
        about = {"model": name, "text": text, "temperature": temperature}
        for (reader, share), each in found.items():
            mean = each.hits.mean(axis=1)
            held.append(
                about | {"reader": reader, "share": share, "held": [float(mean.mean()), *paired.interval(mean)]}
            )
            print(held[-1], flush=True)
        kept = [i for i, tokens in enumerate(after) if not in_a_circle(tokens, CIRCLE)]
        if len(kept) > 1:
            own = found[built, SHARES[1]]
            own = dataclasses.replace(own, hits=own.hits[kept], told=own.told[kept], entropy=own.entropy[kept])
            own = dataclasses.replace(own, circles=len(after) - len(kept))
            walked.append(about | lengths(own, rng))
    model.close()
    return held, walked


def of_models(args: argparse.Namespace, sources: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the shares at which a small model's drafts are accepted, by text and temperature."""
    model, drafter = (load(name, dtype="float32") for name in (args.model, args.drafter))
    cases = []
    asked = grid(counter(model), list(TASKS), [args.row_length], depths=1, samples=2)
    tasks = {"tasks": [one.prompt + one.answer for _, one in asked]}
    for name, parts in (sources | tasks).items():
        rows = cut(model, name, parts, args.rows, args.row_length)
        if not np.array_equal(rows, cut(drafter, name, parts, args.rows, args.row_length)):
            raise UsageError(f"{args.drafter} has other tokens than {args.model}; name a drafter with the same.")
        shape = (args.rows, -1, model.config.vocab_size)
        both = [held_out_logits(each, rows)[0].reshape(shape) for each in (model, drafter)]
        first = args.row_length - both[0].shape[1]
        for temperature in (0.0, *TEMPERATURES):
            found = acceptance(both[0], both[1], temperature, first, args.keys, seed=len(cases) * args.rows * args.keys)
            about = {"text": name, "temperature": temperature, "positions": args.rows * both[0].shape[1]}
            cases.append(about | found)
            print(cases[-1], flush=True)
    return cases


def of_lengths(args: argparse.Namespace, sources: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return what laws of lengths spend on texts that the model writes."""
    model, drafter = (load(name, dtype="float32") for name in (args.model, args.drafter))
    name, parts = next(iter(sources.items()))
    rng = np.random.default_rng(0)
    drafts = []
    for temperature in WRITTEN_AT:
        prompts = cut(model, name, parts, args.prompts if temperature else args.greedy_prompts, LENGTH)
        found = lengths(written(model, drafter, prompts, temperature), rng)
        drafts.append({"temperature": temperature} | found)
    return drafts


def main() -> None:
    parser = arguments.parser(__doc__, "model", results="acceptance.json")
    parser.add_argument("--drafter", default="bundled-small")
    parser.add_argument("--text", nargs=2, action="append", required=True, metavar=("NAME", "FILE"))
    parser.add_argument("--rows", type=arguments.count(2), default=8, help="rows of every text (default 8)")
    parser.add_argument(
        "--row-length", type=arguments.count(2), default=513, help="tokens of a row; half count (default 513)"
    )
    parser.add_argument(
        "--keys", type=arguments.count(), default=16, help="keys that every position is sampled with (default 16)"
    )
    parser.add_argument("--prompts", type=arguments.count(2), default=40, help="texts sampled (default 40)")
    parser.add_argument(
        "--greedy-prompts", type=arguments.count(2), default=240, help="greedy ones, many in a circle (default 240)"
    )
    parser.add_argument("--own-prompts", type=arguments.count(2), default=12, help="of part four (default 12)")
    parser.add_argument("--part", choices=PARTS, help="of the four parts, one alone (default all)")
    args = parser.parse_args()
    results = json.loads(args.output.read_text(encoding="utf-8")) if args.part and args.output.exists() else {}
    names = ("acceptance", "drafts", "self", "readers", "own_lengths")
    cases, drafts, own, readers, walked = (results.get(name, []) for name in names)
    with arguments.refusals("measure_acceptance"):
        sources = {name: works(Path(path)) for name, path in args.text}
        if args.part in (None, "models"):
            cases = of_models(args, sources)
        if args.part in (None, "lengths"):
            drafts = of_lengths(args, sources)
        if args.part in (None, "self"):
            own = [case for name in (args.model, args.drafter) for case in of_itself(name, sources)]
        if args.part in (None, "readers"):
            found = [of_readers(name, sources, args.own_prompts) for name in (args.model, args.drafter)]
            readers, walked = ([case for each in found for case in each[i]] for i in range(2))
    print(
        draft_tables.acceptance(cases),
        draft_tables.draft_lengths(drafts, "0.1"),
        draft_tables.self_acceptance(own),
        draft_tables.self_readers(readers),
        draft_tables.own_lengths(walked, "0.1"),
        sep="\n\n",
    )
    given = ("model", "drafter", "rows", "row_length", "keys", "prompts", "greedy_prompts", "own_prompts")
    settings = {name: getattr(args, name) for name in given}
    settings |= {"prompt_tokens": LENGTH, "row_cost": ROW_COST, "dtype": "float32"}
    write(
        args.output,
        "scripts/measure_acceptance.py",
        settings,
        acceptance=cases,
        drafts=drafts,
        self=own,
        readers=readers,
        own_lengths=walked,
    )


if __name__ == "__main__":
    main()
