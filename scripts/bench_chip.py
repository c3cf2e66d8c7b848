"""Whole decode steps on one NVIDIA GPU, in at most four minutes.

    python -m scripts.bench_chip [--model FOLDER --text FILE] [--profile] [--output FILE] [--resume]
    python -m scripts.bench_chip --list
    python -m scripts.bench_chip --cases "8x32k" "16x8k off"
    python -m scripts.bench_chip --modelled
    python -m scripts.bench_chip --tables

`decode` runs 16 steps in full depth at Llama-3-8B's shape with random bfloat16 weights, over pages of 64 tokens: every
size under "off", Quest at an eighth of the blocks, and presets at tolerances by which 6 to 10% is read; one size with
the model's own drafts; and one sequence of SmolLM-135M's shape. Beside them stand a plain step of torch in one CUDA
graph, where torch is installed, and with --model the steps of `Model.generate` over windows of --text. Times are
medians of three calls, all compiled before the first. --profile counts the kernels of a step.

Each case prints its line, and goes to the file, as soon as it is measured. What a run lacks that was killed, or for
which the time was too short, a second one adds with --resume; cases that failed are tried again. There is a process for
each size: weights are drawn once for all its controls, and their programs compiled several at a time, which takes less
than a process for each case; and the pool of the next size finds memory in one piece. A case that fails, for want of
memory or otherwise, says so in its row and ends its process; the others go on in a new one.

A machine without a GPU has a model of the time: `--modelled` prints bytes over 4.2 TB/s and launches times 2.5 us, from
the bytes of `et_jax.decode.cost` and the kernels that `aot_check.py` counts in compiled programs
(`scripts.chip.modelled`). It is modelled, and not measured. `--quick` runs tiny shapes, on a CPU too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from et_jax.errors import UsageError
from scripts.chip import modelled, processes, report
from scripts.chip.cases import Settings, cases_of, chosen, torch_installed
from scripts.chip.record import Record
from scripts.measuring import arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 where a case failed or the time was too short."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=[], metavar="TEXT", help="those whose names contain a text")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--quick", action="store_true", help="tiny shapes; keeps nothing unless there is an --output")
    parser.add_argument("--output", type=arguments.output, help=f"the JSON file (default {report.PATH.name})")
    parser.add_argument("--resume", action="store_true", help="measure what the file lacks; else it is begun anew")
    parser.add_argument("--profile", action="store_true", help="count the kernels of a step")
    parser.add_argument("--model", default="", help="SmolLM2-135M-Instruct, for `Model.generate`")
    parser.add_argument("--text", type=Path, help="of which its prompts are cut")
    parser.add_argument("--seconds", type=arguments.count(), default=240, help="after which it ends (default 240)")
    parser.add_argument("--modelled", action="store_true", help="print modelled times instead")
    parser.add_argument("--tables", action="store_true", help="write the table of docs/evidence.md instead")
    args = parser.parse_args(words)
    try:
        small = {"steps": 2, "tokens": 8} if args.quick else {}
        given = {"text": args.text.resolve()} if args.text else {}
        model = str(Path(args.model).resolve()) if Path(args.model).is_dir() and args.model else args.model
        settings = Settings(model=model, profile=args.profile, quick=args.quick, **small, **given)
        cases = chosen(cases_of(settings, torch_installed()), args.cases)
        if args.list:
            print("\n".join(case.name for case in cases))
        elif args.modelled:
            print(modelled.shown(cases))
        elif args.tables:
            print("docs/evidence.md" if report.write(args.output or report.PATH) else "There is no run to show.")
        else:
            path = args.output or (None if args.quick else report.PATH)
            record = Record(path, args.resume)
            left = processes.run(settings, cases, record, args.seconds, lambda line: print(line, flush=True))
            for case in left:
                print(f"{case.name}: no time was left", file=sys.stderr)
            return int(any(record.lacks(case) for case in cases))
    except UsageError as error:
        print(f"bench_chip: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
