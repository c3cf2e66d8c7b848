"""Measurements of drafts as the tables that the docs show."""

import statistics
from collections.abc import Sequence

from et_jax.evidence.tables import Case, with_interval
from scripts.measuring.results import table


def drafting(prompted: Sequence[Case]) -> str:
    """Return what drafts save on every kind of prompt."""
    lines = []
    for kind, drafter in dict.fromkeys((case["kind"], case["drafter"]) for case in prompted):
        own = [case for case in prompted if (case["kind"], case["drafter"]) == (kind, drafter)]
        for name, cases in (
            ("that go on", [c for c in own if not c["circle"]]),
            ("in a circle", [c for c in own if c["circle"]]),
        ):
            if cases:
                ratios = [case["ratio"] for case in cases]
                share = sum(case["accepted"] for case in cases) / max(sum(case["drafted"] for case in cases), 1)
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                lines.append([kind, drafter, f"{len(cases)} {name}", f"{share:.0%}", statistics.median(ratios), spread])
    return table(
        ["prompts", "drafts by", "texts", "drafted tokens accepted", "over plain, median", "single texts"], lines
    )


def drafting_forced(forced: Sequence[Case]) -> str:
    """Return what drafts save that hold at a given rate, by the sequences decoded together and the law of lengths."""
    parts, rates = [], sorted({case["rate"] for case in forced})
    for batch in sorted({case["batch"] for case in forced}):
        own = {(case["length"], case["rate"]): case["ratio"] for case in forced if case["batch"] == batch}
        lengths = list(dict.fromkeys(length for length, _ in own))
        lines = [[length, *(own[length, rate] for rate in rates)] for length in lengths]
        noun = "sequence" if batch == 1 else "sequences"
        parts.append(f"{batch} {noun}:\n\n" + table(["drafted", *(f"{rate:.0%} hold" for rate in rates)], lines))
    return "\n\n".join(parts)


def self_drafting(cases: Sequence[Case]) -> str:
    """Return what a model gains that drafts for itself, by tokens cached, sequences, and how often drafts hold.

    Beside each figure stands that of the first text, before anything was known of drafts.
    """
    ways = list(dict.fromkeys(case["way"] for case in cases))
    names = [f"{float(way):.0%} hold" if way[0].isdigit() else f"{way}, trusted" for way in ways]
    lines = []
    for shape in dict.fromkeys((case["context"], case["sequences"]) for case in cases):
        own = {case["way"]: case for case in cases if (case["context"], case["sequences"]) == shape}
        plain = statistics.median(case["tokens_per_second"] for case in own.values())
        lines.append([*shape, plain, *(_after_the_first(own[way]) if way in own else None for way in ways)])
    return table(["tokens", "sequences", "plain, tokens/s", *names], lines)


def _after_the_first(case: Case) -> str:
    """The speed over plain decoding's, and that of the first text where it is told apart."""
    first = f" (first {case['first']:.2f})" if "first" in case else ""
    return f"{case['ratio']:.2f}{first}"


def self_steps(cases: Sequence[Case], held: float = 0.9) -> str:
    """Return what a step takes that drafts so many tokens for itself, and what it brings where a share of them holds.

    The tokens of a step that drafts n are (1 - h^(n + 1)) / (1 - h) on average, of which each but the first is there
    only if all before it held, with a chance of h = `held` each.
    """
    lines = []
    for case in cases:
        plain = case["seconds"]["0"]
        told = [f"{1000 * plain:.0f}"]
        for drafted, seconds in list(case["seconds"].items())[1:]:
            tokens = (1 - held ** (int(drafted) + 1)) / (1 - held)
            told.append(f"{1000 * seconds:.0f} ({tokens * plain / seconds:.2f})")
        lines.append([case["context"], case["sequences"], *told])
    drafted = [f"{n} drafted" for case in cases[:1] for n in list(case["seconds"])[1:]]
    return table(["tokens", "sequences", "plain step, ms", *drafted], lines)


def self_drafting_free(cases: Sequence[Case]) -> str:
    """Return what the bundled model gains on texts that it writes freely."""
    lines = []
    for heat in dict.fromkeys(case["temperature"] for case in cases):
        own = [case for case in cases if case["temperature"] == heat]
        drafted, held = (sum(case[name] for case in own) for name in ("drafted", "accepted"))
        ratios = [case["ratio"] for case in own]
        share = f"{held / drafted:.0%} of {drafted}" if drafted else "none drafted"
        lines.append([f"{heat:g}" if heat else "greedy", len(own), share, statistics.median(ratios), min(ratios)])
    return table(["temperature", "texts", "drafted tokens accepted", "over plain, median", "least"], lines)


def self_acceptance(cases: Sequence[Case]) -> str:
    """Return how many tokens a step brings of a model that drafts for itself, and the share of its drafts that hold."""
    lines = []
    lengths = list(dict.fromkeys(case["length"] for case in cases))
    names = ("model", "text", "temperature", "share")
    for about in dict.fromkeys(tuple(case[name] for name in names) for case in cases):
        own = {case["length"]: case for case in cases if tuple(case[name] for name in names) == about}
        model, text, heat, share = about
        told = [f"{own[n]['accepted'] / own[n]['drafted']:.0%}, {own[n]['tokens_per_step']:.2f}" for n in lengths]
        lines.append([model, text, f"{heat:g}" if heat else "greedy", f"{share:.0%}", *told])
    drafted = [f"{length} drafted: held, tokens a step" for length in lengths]
    return table(["model", "text", "temperature", "blocks read at most", *drafted], lines)


def self_readers(cases: Sequence[Case]) -> str:
    """Return how often the first token of a model's own draft holds, by what the draft reads."""
    readers = list(dict.fromkeys((case["reader"], case["share"]) for case in cases))
    lines = []
    for about in dict.fromkeys((case["model"], case["text"], case["temperature"]) for case in cases):
        own = {
            (case["reader"], case["share"]): case["held"]
            for case in cases
            if (case["model"], case["text"], case["temperature"]) == about
        }
        model, text, heat = about
        lines.append([model, text, f"{heat:g}" if heat else "greedy", *(with_interval(own[one]) for one in readers)])
    return table(["model", "text", "temperature", *(f"{name}, {share:.0%}" for name, share in readers)], lines)


def own_lengths(cases: Sequence[Case], cost: str) -> str:
    """Return what laws of lengths make of a model's own drafts, a drafted token at this cost, and what stops save."""
    names = ("fixed 2", "fixed 4", "fixed 8", f"acceptance, for c {cost}", "stop by entropy, 0.6 nats")
    lines, saved = [], []
    for case in cases:
        speeds = {law["law"]: law["speed"][cost] for law in case["laws"]}
        about = [case["model"], case["text"], f"{case['temperature']:g}" if case["temperature"] else "greedy"]
        lines.append([*about, case["texts"], *(f"{speeds[name]:.2f}" for name in names)])
        for line in case["comparisons"]:
            for stop in dict.fromkeys(one["stop"] for one in line.get("savings", [])):
                over = [one["times"][cost] for one in line["savings"] if one["stop"] == stop]
                saved.append([*about, stop, line["budget"], *map(_saved, over)])
    head = ["model", "text", "temperature"]
    against = ["stop by", "as many drafted as by", "over that law", "over the stop shuffled", "over an even chance"]
    return f"{table([*head, 'texts', *names], lines)}\n\nTime saved by stops:\n\n{table([*head, *against], saved)}"


def acceptance(cases: Sequence[Case]) -> str:
    """Return the share of drafted tokens accepted by every way of sampling alike, with its interval."""
    ways = ("optimum", "race", "sampled", "bound", "inverse CDF")
    lines = [
        [
            case["text"],
            f"{case['temperature']:g}" if case["temperature"] else "greedy",
            *(with_interval(case["shares"].get(way)) for way in ways),
            f"{case['sigmas']:+.1f}" if "sigmas" in case else None,
        ]
        for case in cases
    ]
    return table(["text", "temperature", *ways, "sampled - race, standard errors"], lines)


def draft_lengths(drafts: Sequence[Case], cost: str) -> str:
    """Return what every law of lengths spends on texts of the model, and what stops save at this cost of drafting."""
    parts = []
    for case in drafts:
        costs = list(case["laws"][0]["speed"])
        lines = [
            [law["law"], law["tokens_per_step"], law["drafted_per_token"], f"{law['accepted']:.0%}"]
            + [f"{law['speed'][cost]:.2f}" for cost in costs]
            for law in case["laws"]
        ]
        speeds = [f"speed at c {cost}" for cost in costs]
        saved = []
        for line in case["comparisons"]:
            for stop in dict.fromkeys(one["stop"] for one in line.get("savings", [])):
                over = [one["times"][cost] for one in line["savings"] if one["stop"] == stop]
                saved.append([stop, line["budget"], *map(_saved, over)])
        against = ["stop by", "as many drafted as by", "over that law", "over the stop shuffled", "over an even chance"]
        how = f"Temperature {case['temperature']:g}" if case["temperature"] else "Greedy"
        parts.append(
            f"{how}, {case['texts']} texts of {case['tokens']} tokens, {case['circles']} in a circle left out:\n\n"
            f"{table(['law', 'tokens/step', 'drafted per token', 'accepted', *speeds], lines)}\n\n"
            f"Time saved by stops at c {cost}:\n\n{table(against, saved)}"
        )
    return "\n\n".join(parts)


def _saved(saving: Case) -> str:
    return f"{saving['share']:+.1%} ({saving['low']:+.1%} to {saving['high']:+.1%})"
