"""Measurements of expert rules as the tables that the docs show."""

from et_jax.evidence.tables import Case
from scripts.measuring.results import table


def expert_rules(found: Case) -> str:
    """Return what constants, rules and their shuffles lose, where fewer experts lose it, and what steps touch."""
    dense, constants = found["dense"], found["constants"]
    losses = [[one["experts"], f"{one['loss']:.4f}", over(one["over_trained"])] for one in constants]
    lines = [
        [
            line["budget"],
            line["rule"],
            *(f"{line[name]:.2f}" if name in line else None for name in ("experts", "deviation")),
            f"{line['loss']:.4f}" if "loss" in line else "not reached",
            *(over(line.get(name)) for name in ("over_constant", "over_shuffled", "over_mass")),
        ]
        for line in found["lines"]
    ]
    header = ["experts a token", "rule", "taken", "deviation", "nats", "over a constant", "over its own shuffled"]
    doubt = [[f"{one['entropy']:.2f}", f"{one['lost']:.4f}"] for one in found["by_doubt"]]
    batches = list(found["unions"][0])[2:]
    unions = [[one["rule"], f"{one['experts']:.2f}", *(one[batch] for batch in batches)] for one in found["unions"]]
    return "\n\n".join(
        [
            f"{found['tokens']:,} tokens. The dense model loses {dense['loss']:.4f} nats a token, the mixture as "
            f"trained {over(dense['experts_over_dense'])} over that. The same number of experts for every token:",
            table(["experts", "nats", "over as trained"], losses),
            "By rule, nats a token more than others at as many experts (95%):",
            table([*header, "over mass"], lines),
            "What two experts lose over four, by quarter of the tokens, from the surest prediction before them on:",
            table(["entropy, nats", "nats lost"], doubt),
            "Experts of a layer that a step touches, by rows side by side:",
            table(["rule", "experts a token", *(f"of {batch}" for batch in batches)], unions),
        ]
    )


def over(difference: Case | None) -> str | None:
    """Return a difference in nats with its interval, None where there is none."""
    if difference is None:
        return None
    return f"{difference['mean']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})"
