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

from et_jax.control.experts import Entropy, ExpertRule, Mass, TopK
from et_jax.evidence import arguments, expert_tables, paired
from et_jax.evidence.expert_arms import Taken, counts, even, run, shuffled, union
from et_jax.evidence.held_out import causal_attend, rows
from et_jax.evidence.results import REPOSITORY, write
from et_jax.models.model import forward
from et_jax.serve.engine import Model, load
from et_jax.types import replace

NEVER = 1e9  # nats at which a rule that goes by the gate alone would heed the sequence
RULES: dict[str, tuple[Callable[[float], ExpertRule], float, float]] = {
    "mass": (lambda setting: Mass(1 - setting), 1e-3, 1.0),
    "entropy: sequence": (lambda setting: Entropy(0.0, setting, 0.0), 0.1, 1e3),
    "entropy: sequence, mild": (lambda setting: Entropy(1 - setting, 8.0, 0.0), 1e-3, 1.0),
    "entropy: gate": (lambda setting: Entropy(1 - setting, NEVER, 1.0), 1e-3, 1.0),
    "entropy: both": (lambda setting: Entropy(0.0, setting, 0.5), 0.1, 1e3),
}
"""By name a rule of a setting, at which it takes the fewer experts the greater that is, and where it is searched."""

BUDGETS = (1.5, 2.0, 2.5, 3.0)
TRAINED_AND_MORE = (1, 2, 3, 4, 5, 6, 8)  # experts of every token
BATCHES = (1, 4, 16, 64)


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
    go: Callable[[Any], Taken], of: Callable[[Taken], np.ndarray], name: str, budget: float, within: float
) -> tuple[dict[str, Any], Taken]:
    """Return the figures of a rule at a budget, and what it gave. Raises ValueError where no setting comes near."""
    made, least, most = RULES[name]

    def spent(setting: float) -> tuple[float, Taken]:
        taken = go(made(setting))
        return float(of(taken).mean()), taken

    setting, taken = paired.matched(spent, budget, least, most, within=within)
    own = of(taken)
    mean = float(own.mean())
    rule = made(setting)
    return {
        "rule": name,
        "numbers": vars(rule),
        "experts": mean,
        "deviation": float(own.std()),
        "loss": float(np.mean(taken.loss)),
        "over_constant": difference(taken.loss, go(even(mean, own)).loss),
        "over_shuffled": difference(taken.loss, go(shuffled(own)).loss),
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
    go = partial(run, config, model.params, tokens, start=args.prompt)
    of = partial(counts, config)
    trained = go(TopK())
    like, base = of(trained), np.asarray(trained.loss)
    alone = dense_losses(dense, tokens, args.prompt)
    constants = []
    for number in TRAINED_AND_MORE:
        if number <= config.experts.num_per_token:
            taken = go(np.full_like(like, number))
        else:
            more = replace(config, experts=replace(config.experts, num_per_token=number))
            taken = run(more, model.params, tokens, TopK(), start=args.prompt)
        constants.append(
            {"experts": number, "loss": float(np.mean(taken.loss)), "over_trained": difference(taken.loss, base)}
        )
        print(constants[-1], flush=True)
    lines: list[dict[str, Any]] = []
    unions = [
        {"rule": "as trained", "experts": float(like.mean())} | {str(b): union(config, trained, b) for b in BATCHES}
    ]
    for budget in BUDGETS:
        by_mass = None
        for name in RULES:
            try:
                line, taken = compared(go, of, name, budget, args.within)
            except ValueError as error:
                lines.append({"budget": budget, "rule": name, "missed": str(error)})
                continue
            if name == "mass":
                by_mass = taken
            elif by_mass is not None:
                line["over_mass"] = difference(taken.loss, by_mass.loss)
            lines.append({"budget": budget} | line)
            print(lines[-1], flush=True)
            if budget == 2.0:
                touched = {str(b): union(config, taken, b) for b in BATCHES}
                unions.append({"rule": name, "experts": line["experts"]} | touched)
    return {
        "tokens": int(like.shape[0] * like.shape[1]),
        "dense": {"loss": float(alone.mean()), "experts_over_dense": difference(base, alone)},
        "constants": constants,
        "lines": lines,
        "by_doubt": by_doubt(go(np.full_like(like, 2)), trained),
        "unions": unions,
    }


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
