"""How many experts should a token go to? Entropy against mass, a constant, and its own numbers shuffled.

    python scripts/measure_experts.py --text novels.tar.xz

A mixture that was trained here reads held-out text as it decodes: of every row the first tokens as trained, the others
by a rule (`scripts/train_experts.py` makes the mixture, and the dense model as large as what a token meets of it). A
number of every rule is searched at which tokens go to the wanted number of experts, on average over tokens and layers.
Then its loss is compared, row by row, at exactly the experts that it took: with a constant number (where that is no
whole one, the greater stands at random places), and with its own numbers given to other tokens.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from et_jax.control.experts import Entropy, ExpertRule, Mass
from et_jax.evidence import expert_tables
from et_jax.evidence.expert_arms import Taken, counts, even, run, shuffled, union
from et_jax.models.config import ModelConfig
from et_jax.models.model import forward
from et_jax.serve.engine import Model, load
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring.results import REPOSITORY, write
from scripts.measuring.text import causal_attend, rows

NEVER = 1e9  # nats at which a rule that goes by the gate alone would heed the sequence
RULES: dict[str, tuple[Callable[[float], ExpertRule], float, float]] = {
    "mass": (lambda setting: Mass(1 - setting), 1e-3, 1.0),
    "entropy: sequence": (lambda setting: Entropy(0.0, setting, 0.0), 0.1, 1e3),
    "entropy: sequence, mild": (lambda setting: Entropy(1 - setting, 8.0, 0.0), 1e-3, 1.0),
    "entropy: gate": (lambda setting: Entropy(1 - setting, NEVER, 1.0), 1e-3, 1.0),
    "entropy: both": (lambda setting: Entropy(0.0, setting, 0.5), 0.1, 1e3),
}
"""By name a rule of a setting, at which it takes the fewer experts the greater that is, and where it is searched."""

EXPERTS = (1, 2, 3, 4, 5, 6, 8)  # of every token alike; the last is the most
BATCHES = (1, 4, 16, 64)
UNION_AT = 2.0  # experts a token, at which what steps touch is told rule by rule


def dense_losses(model: Model, tokens: np.ndarray, start: int) -> Float[np.ndarray, "r m"]:
    """Return what a model without experts loses, at the tokens that `run` measures."""
    length = tokens.shape[1] - 1

    @jax.jit
    def losses(row: jax.Array) -> jax.Array:
        positions = jnp.arange(length)[None]
        logits, _ = forward(model.params, model.config, row[None, :-1], positions, causal_attend, None)
        following = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), row[1:, None], axis=1)
        return -following[start:, 0]

    return np.asarray(jax.lax.map(losses, tokens))


def difference(losses: Any, others: Any) -> dict[str, float]:
    """Return the mean of a loss over another on the same tokens, nats, and what holds it with 95%, by rows."""
    by_row = np.mean(np.asarray(losses) - np.asarray(others), axis=1)
    low, high = paired.interval(by_row)
    return {"mean": float(by_row.mean()), "low": low, "high": high}


def compared(
    by: Callable[[ExpertRule], Taken],
    told: Callable[[Any], Taken],
    of: Callable[[Taken], np.ndarray],
    name: str,
    budget: float,
    within: float,
) -> tuple[dict[str, Any], Taken]:
    """Return the figures of a rule at a budget, and what it gave. Raises ValueError where no setting comes near."""
    made, least, most = RULES[name]

    def spent(setting: float) -> tuple[float, Taken]:
        taken = by(made(setting))
        return float(of(taken).mean()), taken

    if (fewest := spent(most)[0]) > budget:
        raise ValueError(f"takes {fewest:.2f} experts at the fewest")
    setting, taken = paired.matched(spent, budget, least, most, within=within)
    own = of(taken)
    mean = float(own.mean())
    return {
        "rule": name,
        "numbers": vars(made(setting)),
        "experts": mean,
        "deviation": float(own.std()),
        "loss": float(np.mean(taken.loss)),
        "over_constant": difference(taken.loss, told(even(mean, own)).loss),
        "over_shuffled": difference(taken.loss, told(shuffled(own)).loss),
    }, taken


def by_doubt(fewer: Taken, more: Taken) -> list[dict[str, float]]:
    """Return by quarter of the tokens, from the surest prediction before them on, what fewer experts lose, nats."""
    entropy, lost = np.asarray(more.entropy)[:, 1:], np.asarray(fewer.loss - more.loss)[:, 1:]
    edges = np.quantile(entropy, [0, 0.25, 0.5, 0.75, 1])
    found = []
    for low, high in itertools.pairwise(edges):
        mask = (entropy >= low) & (entropy <= high)
        found.append({"entropy": float(entropy[mask].mean()), "lost": float(lost[mask].mean())})
    return found


def measure(model: Model, dense: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of a mixture and the dense model beside it."""
    config, tokens = model.config, rows(model, args.text, args.rows, args.prompt + args.tokens + 1)
    assert config.experts is not None
    by = partial(run, config, model.params, tokens, start=args.prompt)
    most = replace(config, experts=replace(config.experts, num_per_token=EXPERTS[-1]))
    told = partial(run, most, model.params, tokens, start=args.prompt)
    shape = args.rows, args.tokens, sum(config.experts.layers)
    alike = {number: told(np.full(shape, number, np.int32)) for number in EXPERTS}
    trained, alone = alike[config.experts.num_per_token], dense_losses(dense, tokens, args.prompt)
    lines: list[dict[str, Any]] = []
    unions = [_touched(config, "as trained", trained)]
    for budget in args.budgets:
        by_mass = None
        for name in RULES:
            line: dict[str, Any] = {"budget": budget, "rule": name}
            try:
                found, taken = compared(by, told, partial(counts, config), name, budget, args.within)
            except ValueError as error:
                lines.append(line | {"missed": str(error)})
                continue
            if name == "mass":
                by_mass = taken
            elif by_mass is not None:
                found["over_mass"] = difference(taken.loss, by_mass.loss)
            lines.append(line | found)
            print(lines[-1], flush=True)
            if budget == UNION_AT:
                unions.append(_touched(config, name, taken))
    return {
        "tokens": args.rows * args.tokens,
        "dense": {"loss": float(alone.mean()), "experts_over_dense": difference(trained.loss, alone)},
        "constants": [
            {"experts": number, "loss": float(np.mean(one.loss)), "over_trained": difference(one.loss, trained.loss)}
            for number, one in alike.items()
        ],
        "lines": lines,
        "by_doubt": by_doubt(alike[2], trained),
        "unions": unions,
    }


def _touched(config: ModelConfig, name: str, taken: Taken) -> dict[str, Any]:
    """What steps of so many rows touch under a rule."""
    touched = {str(batch): union(config, taken, batch) for batch in BATCHES}
    return {"rule": name, "experts": float(counts(config, taken).mean())} | touched


def main() -> None:
    """Parse the arguments, measure, print the tables and write the figures."""
    parser = arguments.parser(__doc__, "text", results="expert_rules.json")
    parser.add_argument(
        "--model", default=str(REPOSITORY / "models/experts"), help="a mixture (default: that kept here)"
    )
    parser.add_argument("--dense", default=str(REPOSITORY / "models/experts-dense"), help="the model beside it")
    parser.add_argument("--rows", type=arguments.count(64), default=128, help="of held-out text (default 128)")
    parser.add_argument("--prompt", type=arguments.count(), default=63, help="tokens read as trained (default 63)")
    parser.add_argument("--tokens", type=arguments.count(), default=128, help="measured of every row (default 128)")
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[1.5, 2.0, 2.5, 3.0], help="experts a token (default 1.5 2 2.5 3)"
    )
    parser.add_argument("--within", type=float, default=0.005, help="of a budget, over it (default 0.005)")
    args = parser.parse_args()
    with arguments.refusals("measure_experts"):
        model, dense = (load(name, dtype="float32") for name in (args.model, args.dense))
        found = measure(model, dense, args)
    print(expert_tables.expert_rules(found))
    names = ("rows", "prompt", "tokens", "within")
    settings = {"model": Path(args.model).name, "text": args.text.name} | {name: getattr(args, name) for name in names}
    write(args.output, "scripts/measure_experts.py", settings | {"dtype": "float32"}, **found)


if __name__ == "__main__":
    main()
