"""EntropyInfer's budgets as printed, and as its code has them, beside constant ones: of one size, and at equal blocks.

    python scripts/measure_printed_budgets.py --text novels.tar.xz

Rows of held-out text are read as `measure_prefill.py` reads them. As printed a head's budget begins at B_0 tokens and
never falls below; its entropy can only add blocks. "released" is the same with the largest budget of a layer for all of
its heads, as the code has it. Told are the share of blocks read, the KL divergence from dense reading with its 95%
interval from resampling rows, and what is saved of that of a constant budget: of the same B_0, which reads less, and of
the size at which it reads as many blocks.
"""

from typing import Any

from measure_prefill import BASELINE, Bench, arms, line

from et_jax.control.budget import ConstantBudget, EntropyBudget
from et_jax.evidence import prompt_tables
from et_jax.serve.engine import load
from scripts.measuring import arguments
from scripts.measuring.results import write

SIZES = (64, 128, 256, 512)  # B_0, tokens
WITHIN = 0.04  # of the share read: a constant budget is of whole blocks


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Return a line per size and budget."""
    lines = []
    for tokens in SIZES:
        constant = bench.run(ConstantBudget(tokens=tokens, **bench.settings()), len(bench.given))
        lines.append({"tokens": tokens, "arm": BASELINE} | line(constant, constant))
        print(*lines[-1].values(), flush=True)
        for name, shared in (("printed", False), ("released", True)):
            budget = EntropyBudget(tokens=tokens, printed=True, shared=shared, **bench.settings())
            found = bench.run(budget, len(bench.given))
            entry = {"tokens": tokens, "arm": name} | line(found, constant)
            setting, equal = bench.at_share(arms(bench)[BASELINE], entry["share_read"], within=WITHIN)
            at_equal = line(found, equal)["saving"]
            lines.append(entry | {"equal": {"setting": setting} | line(equal, equal), "saving_at_equal": at_equal})
            print(*lines[-1].values(), flush=True)
    return lines


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    args = arguments.parser(__doc__, "model", "text", "rows", "segment", results="printed_budgets.json").parse_args()
    with arguments.refusals("measure_printed_budgets"):
        model = load(args.model, dtype="float32", max_num_seqs=4)
        bench = Bench(model, args.text, args.rows, args.segment)
    lines = measure(bench)
    print(prompt_tables.printed_budgets(lines))
    settings = {"model": args.model, "text": args.text.name, "rows": args.rows, "segment": args.segment}
    write(args.output, "scripts/measure_printed_budgets.py", settings, lines=lines)


if __name__ == "__main__":
    main()
