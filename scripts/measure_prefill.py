"""What reading less of a prompt does, and which budget spends its blocks best: arms at equal blocks read, side by side.

    python scripts/measure_prefill.py --text novels.tar.xz

Rows of held-out text at full context are read segment by segment, each with the blocks its budget chooses; no segment
counts as the last, and the first two are dense. Every arm's size is searched until it reads the wanted share of the
blocks before the segments, on a few rows; then all rows are read. Told are the KL divergence from dense reading and the
loss of the next token over the tokens of the segments that leave blocks out, with 95% intervals from resampling rows,
the share read on all rows, and what it saves of the divergence of a constant budget, row by row.

The arms: a constant number of blocks; EntropyInfer's budgets, sound ("entropy") and as printed with the floor taken
away ("entropy, printed"), with all heads given the largest of their layer ("entropy, shared"), and with a layer's
budgets shuffled over its heads ("entropy, shuffled"); budgets in proportion to a head's entropy rather than to how it
changes ("level", and shuffled likewise); the fewest blocks that hold a mass ("mass"); the newest blocks and the first
("recent"); and blocks chosen by chance ("random"). Apart is told what certificates read; EntropyInfer as printed, with
its floor at the budget itself, is measured by `measure_printed_budgets.py`.
Then questions are asked, whose prompts are read by a constant number of blocks, by entropy and by mass, at the sizes
found on the text: right answers beside those of dense reading, the last segment of every prompt dense.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.control.budget import Budget, CertifiedBudget, ConstantBudget, EntropyBudget, MassBudget
from et_jax.control.controller import Controller
from et_jax.decode.plant import Plant
from et_jax.evidence import prompt_tables
from et_jax.evidence.prompt_arms import (
    AtRandom,
    Reading,
    Recent,
    RigidFor,
    SizedConstant,
    SizedEntropy,
    SizedLevel,
    SizedMass,
    compared,
    logits_of,
)
from et_jax.serve.engine import Model, load
from et_jax.tasks.asking import counter, evaluate, grid
from et_jax.tasks.generators import TASKS
from scripts.measuring import arguments, paired
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write
from scripts.measuring.text import rows

SHARES = (0.5, 0.25, 0.125, 0.0625)
FLOOR, CAP = 0.05, 20.0  # of a budget, where entropy may take as well as give
BASELINE = "constant"
FEW = 4  # rows on which a size is searched
PART = 4  # rows at a time
ASKED = (0.25, 0.0625)  # shares at which questions are asked
LEFT = (0.05, 0.5, 0.95)


class Bench:
    """One model's rows of text, and what arms give on them."""

    def __init__(self, model: Model, text: Path, count: int, segment: int) -> None:
        self.config, self.params, self.segment = model.config, model.params, segment
        self.plant = self.plant_of(model)
        self.page_size = self.plant.page_size
        tokens = rows(model, text, count, self.config.max_positions)
        length = (tokens.shape[1] - 1) // segment * segment
        self.given = jnp.asarray(tokens[:, :length])
        self.following = jnp.asarray(tokens[:, 1 : length + 1])
        self.dense_until = 2 * segment

    @staticmethod
    def plant_of(model: Model) -> Plant:
        """Return a model as prompts are read by it."""
        size = model.decoder_config.page_size
        return Plant(model=model.config, page_size=size, backend="xla", scores_backend="xla")

    def settings(self) -> dict[str, int]:
        """Return what all budgets share."""
        return {"segment": self.segment, "dense_layers": 1, "dense_until": self.dense_until}

    def run(self, budget: Budget, count: int) -> Reading:
        """Return what a budget gives of the first rows, at the tokens where blocks may be left out."""
        parts = []
        for at in range(0, count, PART):
            given, following = self.given[at : at + PART], self.following[at : at + PART]
            dense = logits_of(self.plant, self.params, self.dense, given, segment=self.segment)[0]
            got = logits_of(self.plant, self.params, budget, given, segment=self.segment)
            parts.append(jax.device_get(_compared(dense, got, following)))
        whole = jax.tree.map(lambda *each: np.concatenate(each), *parts)
        cut = slice(self.dense_until, None)
        return Reading(loss=whole.loss[:, cut], divergence=whole.divergence[:, cut], read=whole.read, held=whole.held)

    @property
    def dense(self) -> Budget:
        """A budget that leaves nothing out."""
        return ConstantBudget(segment=self.segment, dense_until=self.given.shape[1])

    def at_share(self, make: Callable[[float], Budget], share: float, within: float = 0.01) -> tuple[float, Reading]:
        """Return the setting at which an arm reads this share, to a part of it, and what it gives of all rows there."""

        def spend(setting: float) -> tuple[float, Reading]:
            found = self.run(make(setting), FEW)
            return float(found.read.sum() / found.held.sum()), found

        setting, _ = paired.matched(spend, share, 1e-6, 1e4, within=within)
        return setting, self.run(make(setting), len(self.given))


_compared = jax.jit(compared)


def arms(bench: Bench) -> dict[str, Callable[[float], Budget]]:
    """Return every arm by name: a budget of a setting, which reads less as the setting rises."""
    common, length = bench.settings(), float(bench.given.shape[1])

    def sized(kind: type, **more: Any) -> Callable[[float], Budget]:
        return lambda setting: kind(tokens=jnp.float32(length / setting), **common, **more)

    entropy = partial(sized, SizedEntropy, floor=FLOOR, cap=CAP)
    return {
        BASELINE: sized(SizedConstant),
        "entropy": entropy(),
        "entropy, printed": entropy(printed=True),
        "entropy, shared": entropy(shared=True),
        "entropy, shuffled": entropy(shuffled=True),
        "level": sized(SizedLevel),
        "level, shuffled": sized(SizedLevel, shuffled=True),
        "mass": lambda setting: SizedMass(left=jnp.float32(setting / (1.0 + setting)), **common),
        "recent": sized(Recent),
        "random": sized(AtRandom),
    }


def line(found: Reading, constant: Reading) -> dict[str, Any]:
    """Return the figures of an arm."""
    by_row, baseline = found.divergence.mean(axis=1), constant.divergence.mean(axis=1)
    losses = found.loss.mean(axis=1)
    return {
        "share_read": float(found.read.sum() / found.held.sum()),
        "divergence": float(by_row.mean()),
        "divergence_interval": paired.interval(by_row),
        "loss": float(losses.mean()),
        "saving": vars(paired.saving(by_row, baseline)),
    }


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Return a line per arm and share."""
    lines = []
    for share in SHARES:
        constant = None
        for name, make in arms(bench).items():
            entry: dict[str, Any] = {"arm": name, "share": share}
            try:
                setting, found = bench.at_share(make, share)
            except ValueError as error:
                lines.append(entry | {"missed": str(error)})
            else:
                constant = found if constant is None else constant
                lines.append(entry | {"setting": setting} | line(found, constant))
            print(*lines[-1].values(), flush=True)
    return lines


def certified(bench: Bench) -> list[dict[str, Any]]:
    """Return the share that is read where no query may leave more than a part of its mass, proved."""
    lines = []
    for left in LEFT:
        found = bench.run(CertifiedBudget(left=left, **bench.settings()), FEW)
        lines.append({"left": left, "share_read": float(found.read.sum() / found.held.sum())})
        print(*lines[-1].values(), flush=True)
    return lines


def rigid(bench: Bench) -> list[dict[str, Any]]:
    """Return how often a head counts as rigid though a later segment shows otherwise: online against in advance."""
    lines = []
    for printed in (True, False):
        budget = RigidFor(printed=printed, **bench.settings())
        kept = []
        for at in range(0, len(bench.given), PART):
            given = bench.given[at : at + PART]
            kept.append(jax.device_get(logits_of(bench.plant, bench.params, budget, given, segment=bench.segment)[3]))
        whole = jax.tree.map(lambda *each: np.concatenate(each), *kept)
        sparse = slice(1, None)  # layers
        final, waited = whole.notes.rigid[:, sparse], whole.rigid_for[:, sparse]
        segments = bench.given.shape[1] // bench.segment - 1
        lines.append(
            {
                "entropy": "printed" if printed else "sound",
                "rigid_to_the_end": float(final.mean()),
                "segments_that_differ": float(np.where(final, 0, waited).mean() / segments),
            }
        )
        print(*lines[-1].values(), flush=True)
    return lines


def questions(model: Model, bench: Bench, lines: list[dict[str, Any]], samples: int) -> list[dict[str, Any]]:
    """Return right answers of every task, where prompts are read densely, and by the budgets at their sizes on text."""
    length, common = bench.given.shape[1], bench.settings()
    settings = {(one["arm"], one["share"]): one["setting"] for one in lines if "setting" in one}
    made: dict[str, Callable[[float], Budget]] = {
        BASELINE: lambda at: ConstantBudget(tokens=round(length / at), **common),
        "entropy": lambda at: EntropyBudget(tokens=round(length / at), floor=FLOOR, cap=CAP, **common),
        "mass": lambda at: MassBudget(left=at / (1.0 + at), **common),
    }
    found = []
    for task in TASKS:
        asked = grid(counter(model), [task], [model.max_model_len], depths=DEPTHS, samples=samples)
        dense = [answer.right for answer in evaluate(model, asked, control="off")]
        for name, make in made.items():
            for share in ASKED:
                if (name, share) not in settings:
                    continue
                control = Controller(budget=make(settings[name, share]))
                right = [answer.right for answer in evaluate(model, asked, control=control)]
                entry = {"task": task, "questions": len(asked), "dense": sum(dense), "arm": name, "share": share}
                found.append(entry | {"right": sum(right), "p": paired.p_of_losses(dense, right)})
                print(*found[-1].values(), flush=True)
    return found


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    args = arguments.parser(
        __doc__, "model", "text", "rows", "samples", "segment", results="prefill_budgets.json"
    ).parse_args()
    with arguments.refusals("measure_prefill"):
        model = load(args.model, dtype="float32", max_num_seqs=4)
        bench = Bench(model, args.text, args.rows, args.segment)
    found = measure(bench)
    answers = questions(model, bench, found, args.samples)
    dense = bench.run(bench.dense, len(bench.given))
    print(prompt_tables.prefill_budgets(found, answers))
    settings = {"model": args.model, "text": args.text.name, "rows": args.rows, "segment": args.segment}
    settings |= {"samples": args.samples}
    settings |= {"page_size": bench.page_size, "dense_loss": float(dense.loss.mean())}
    write(
        args.output,
        "scripts/measure_prefill.py",
        settings,
        arms=found,
        questions=answers,
        rigid=rigid(bench),
        certified=certified(bench),
    )


if __name__ == "__main__":
    main()
