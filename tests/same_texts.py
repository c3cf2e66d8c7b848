"""Record what a version of the package writes, or compare this version with a record, on one machine.

    python tests/same_texts.py record FILE
    python tests/same_texts.py compare FILE [--rounding 1e-5]

Sixty-three completions of the bundled model: every preset and some of its knobs, greedy and sampled, truncations,
penalties, stop strings, several continuations, log-probabilities, long prompts whose blocks are pruned, sequences moved
to the host and back, beginnings found in the cache, a law of one's own, rows of a batch file. Tokens and texts must be
equal, the figures of every token within `--rounding`, relative. Two machines may round differently, so a record is
compared where it was made, and is no test of the suite.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import et_jax
from et_jax import Completion, Controller, GenerationRequest, SamplingParams, chain, preset, replace
from et_jax.control import clock

FIGURES = ("entropy", "varentropy", "temperature", "surprisal", "kept_mass", "entropic_time")
COUNTS = ("token", "text", "blocks_read", "blocks_held")
TEXT = (
    "It was late in the autumn when the letter came, and nobody in the house would say from whom it was. "
    "She had put it upon the table, and there it lay; the old man looked at it, and then at the fire. "
)


def requests() -> list[GenerationRequest]:
    """Return eight requests, each of another kind; two have prompts of many cache blocks."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.7, "top_p": 0.9},
        {"seed": 3, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
        {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 3},
        {"seed": 5, "stop": (".", "and the"), "n": 2},
    ]
    long = [{"seed": 6, "temperature": 0.9, "max_tokens": 24}, {"temperature": 0.0, "max_tokens": 24}]
    short = [
        GenerationRequest(prompt=f"It was the {i}th", params=SamplingParams(**{"max_tokens": 24} | given))
        for i, given in enumerate(settings)
    ]
    return short + [
        GenerationRequest(prompt=TEXT * (7 + i), params=SamplingParams(**given)) for i, given in enumerate(long)
    ]


def warm(signals: Any, state: Any) -> Any:
    """Set the temperature by the entropy: a law of one's own."""
    return replace(state, temperature=0.5 + 0.1 * signals.entropy)


def written() -> Iterator[tuple[str, list[Completion]]]:
    """Yield the completions of every case by its name."""
    model = et_jax.load(max_num_seqs=4)
    asked = requests()
    for name in ("off", "paper", "guarded", "certified", "adaptive", "share"):
        yield name, model.generate(asked, control=preset(name))
    for name, knobs in (("guarded", {"target_entropy": 2.0}), ("certified", {"tolerance": 0.2, "window": 32})):
        yield f"{name} {knobs}", model.generate(asked[2:4] + asked[6:7], control=preset(name, **knobs))
    own = Controller(law=chain(clock.FallClock(), warm))
    yield "a law of one's own", model.generate(asked[1:3], control=own)
    yield "beginnings found", model.generate([asked[6], asked[7], asked[6]])
    moved = et_jax.load(max_num_seqs=4, max_model_len=512, num_pages=40, preempt_every=3)
    yield "moved to the host and back", moved.generate(asked[:5])
    yield "two replicas", et_jax.load(max_num_seqs=2, replicas=2).generate(asked[:5])


def batch_rows() -> list[Any]:
    """Return the choices of a batch file's rows, by the order of its lines."""
    lines = [
        {"id": f"line {i}", "prompt": f"It was the {i}th", "max_tokens": 12, "seed": i, "n": 1 + i % 2, "logprobs": 2}
        for i in range(6)
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-m", "et_jax.generate", "-i", str(source), "-o", str(output)]
        subprocess.run(command, check=True, capture_output=True)
        rows = {row["custom_id"]: row for row in map(json.loads, output.read_text(encoding="utf-8").splitlines())}
    return [rows[line["id"]]["response"]["body"]["choices"] for line in lines]


def record() -> dict[str, Any]:
    """Return all that is compared, as plain values."""

    def plain(completion: Completion) -> dict[str, Any]:
        trace = [{name: getattr(row, name) for name in FIGURES + COUNTS} for row in completion.trace]
        return {"text": completion.text, "finish_reason": completion.finish_reason, "trace": trace}

    cases: dict[str, Any] = {name: [plain(one) for one in completions] for name, completions in written()}
    return cases | {"batch rows": batch_rows()}


def differences(before: Any, after: Any, rounding: float, where: str = "") -> Iterator[str]:
    """Yield where two records differ: values must be equal, numbers that are no integers within `rounding`."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name in before:
            yield from differences(before[name], after[name], rounding, f"{where} / {name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, rounding, f"{where} / {number}")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=rounding, abs_tol=rounding):
            yield f"{where}: {before} and {after}"
    elif before != after:
        yield f"{where}: {str(before)[:80]} and {str(after)[:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounding", type=float, default=1e-5)
    args = parser.parse_args()
    now = json.loads(json.dumps(record()))
    count = sum(len(case) for case in now.values())
    if args.what == "record":
        args.file.write_text(json.dumps(now), encoding="utf-8")
        print(f"{count} completions recorded")
        return
    before = json.loads(args.file.read_text(encoding="utf-8"))
    found = list(differences(before, now, args.rounding))
    for difference in found[:20]:
        print(difference)
    exact = not found and not list(differences(before, now, 0.0))
    print(f"{count} completions, {len(found)} differences" + (", equal to the last bit" if exact else ""))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
