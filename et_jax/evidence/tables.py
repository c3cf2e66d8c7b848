"""The Markdown tables of reading, each from its results file alone: what the scripts print and the documents show."""

from collections.abc import Sequence
from typing import Any

from scripts.measuring.results import table

Case = dict[str, Any]  # a model on a text, or a setting, as the file has it


def estimators(cases: Sequence[Case]) -> str:
    """Return correlation, bias, error, width (nats) and containment by estimator, for each model and text."""
    header = ["estimator", "correlation", "bias", "mean error", "mean width", "contained"]
    keys = ("estimator", "correlation", "bias", "error", "width", "containment")
    return "\n\n".join(
        f"{case['model']} on {case['text']}, {case['tokens']} tokens, mean entropy {case['mean_entropy']:.3f} nats, "
        f"calibrated temperature {case['calibrated_temperature']:.3f}:\n\n"
        f"{table(header, [[line[key] for key in keys] for line in case['estimators']])}"
        for case in cases
    )


def bounds(cases: Sequence[Case]) -> str:
    """Return how much each bound opens and what is left of the output, for each model and text."""
    return "\n\n".join(
        f"{case['model']} ({case['shape']}), {case['text']}:\n\n{_opened(case)}\n\n{_residual(case)}" for case in cases
    )


def _opened(case: Case) -> str:
    """Return the share of blocks opened, by bound and tolerance."""
    tolerances = case["page_sizes"][0]["bounds"][0]["opened"]
    header = ["bound", "page", "slack, nats", *[f"eps {tolerance}" for tolerance in tolerances], "unread / eps at most"]
    lines = [
        [row["bound"], size["page_size"], row["slack"], *row["opened"].values(), row["largest_unread_over_tolerance"]]
        for size in case["page_sizes"]
        for row in size["bounds"]
    ]
    return table(header, lines)


def _residual(case: Case) -> str:
    """Return the relative error of the output, by share of blocks open and by what stands for the rest."""
    first = case["page_sizes"][0]["residual"]
    shares, estimates = (list(dict.fromkeys(entry[key] for entry in first)) for key in ("open", "estimate"))
    lines = [
        [f"{share:.0%}", size["page_size"], *[e["relative_error"] for e in size["residual"] if e["open"] == share]]
        for size in case["page_sizes"]
        for share in shares
    ]
    return table(["blocks open", "page", *estimates], lines)


def arms(cases: Sequence[Case]) -> str:
    """Return what each arm saves of the divergence, with its interval, by share of blocks read."""
    parts = []
    for case in cases:
        shares = list(dict.fromkeys(line["share"] for line in case["arms"]))
        by_arm: dict[tuple[bool, str], dict[float, Case]] = {}
        for line in case["arms"]:
            by_arm.setdefault((line["residual"], line["arm"]), {})[line["share"]] = line
        lines = [
            ["mean value" if residual else "nothing", arm, *[saving(found.get(share)) for share in shares]]
            for (residual, arm), found in by_arm.items()
        ]
        parts.append(
            f"{case['model']} on {case['text']}, {case['context']} tokens, {case['rows']} rows:\n\n"
            f"{table(['unread counts as', 'tolerance by', *[f'{share:.0%} read' for share in shares]], lines)}"
        )
    return "\n\n".join(parts)


def saving(line: Case | None) -> str | None:
    """Return the divergence of the baseline, the saving of any other arm; a dash where no setting spends the budget."""
    if line is None or "missed" in line:
        return None
    saving = line["saving"]
    if saving["low"] == saving["high"] == 0.0:
        return f"KL {line['divergence']:.3g}"
    return f"{saving['share']:+.0%} ({saving['low']:+.0%} to {saving['high']:+.0%})"


def free_running(tasks: Sequence[Case]) -> str:
    """Return right answers by task, kind of tolerance and share of blocks read; a star where fewer than by chance."""
    shares = list(dict.fromkeys(line["share"] for line in tasks[0]["arms"]))
    lines = []
    for task in tasks:
        for name in dict.fromkeys(line["tolerance_by"] for line in task["arms"]):
            by_share = {line["share"]: line for line in task["arms"] if line["tolerance_by"] == name}
            cells = [right(by_share[share]) for share in shares]
            lines.append([task["task"], name, f"{task['dense']}/{task['questions']}", *cells])
    return table(["task", "tolerance by", "all read", *[f"{share:.0%} read" for share in shares]], lines)


def pruning(cases: Sequence[Case]) -> str:
    """Return right answers, blocks and bytes by task, length and way of pruning; a star where fewer than by chance."""
    parts = []
    for length in dict.fromkeys(case["length"] for case in cases):
        own = [case for case in cases if case["length"] == length]
        header = ["E_b > theta", *[f"{case['task']} ({case['dense']}/{case['questions']})" for case in own]]
        lines = []
        for index, arm in enumerate(line["arm"] for line in own[0]["arms"]):
            found = [case["arms"][index] for case in own]
            cells = [f"{right(one)}, {one['share_read']:.0%}, {one['share_bytes']:.0%}" for one in found]
            lines.append([arm, *cells])
        parts.append(f"{length} tokens:\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def codes(found: Sequence[Case]) -> str:
    """Return right answers, blocks and bytes by task, selector and kind of codes; a star where fewer than by chance."""
    tasks = {line["task"]: f"{line['task']} ({line['dense']}/{line['questions']})" for line in found}
    by = {(line["selector"], line["codes"], line["task"]): line for line in found}
    rows = list(dict.fromkeys((line["selector"], line["codes"]) for line in found))

    def cell(line: Case) -> str:
        return f"{right(line)}, {line['share_read']:.0%}, {line['share_bytes']:.0%}"

    lines = [[selector, kind, *(cell(by[selector, kind, task]) for task in tasks)] for selector, kind in sorted(rows)]
    return table(["chosen by", "codes", *tasks.values()], lines)


def pruning_cost(cases: Sequence[Case]) -> str:
    """Return milliseconds a step, over reading everything, and the shares read, by length and way of pruning."""
    keys = ("control", "milliseconds", "over_off", "share_read", "share_bytes")
    lines = [[case["length"], *(row[key] for key in keys)] for case in cases for row in case["rows"]]
    return table(["tokens", "way", "ms a step", "over off", "blocks read", "bytes moved"], lines)


NO_SLOWER = 1.03  # of the time of `off`: what lies below is noise


def steps(cases: Sequence[Case]) -> str:
    """Return milliseconds a step and over reading everything, and the share read, by model, rows, length and preset.

    A second table has the length from which on each preset is no slower than `off` at all lengths measured.
    """
    keys = ("control", "milliseconds", "over_off", "share_read")
    lines = [
        [case["model"], case["rows"], case["length"], *(way[key] for key in keys)]
        for case in cases
        for way in case["ways"]
    ]
    whole = table(["model", "rows", "tokens", "control", "ms a step", "over off", "blocks read"], lines)
    settings = list(dict.fromkeys((case["model"], case["rows"]) for case in cases))
    controls = list(dict.fromkeys(way["control"] for case in cases for way in case["ways"] if way["control"] != "off"))
    starts = []
    for own in [*settings, None]:
        some = [case for case in cases if own in (None, (case["model"], case["rows"]))]
        starts.append([*(own or ("all", None)), *(pays_from(some, control) or "never" for control in controls)])
    return f"{whole}\n\n{table(['model', 'rows', *(f'{control} from' for control in controls)], starts)}"


def pays_from(cases: Sequence[Case], control: str) -> int | None:
    """Return the least length from which on a preset is no slower than `off` in any case; None where there is none."""
    slowest: dict[int, float] = {}
    for case in cases:
        for way in case["ways"]:
            if way["control"] == control:
                slowest[case["length"]] = max(way["over_off"], slowest.get(case["length"], 0.0))
    found = None
    for length in sorted(slowest, reverse=True):
        if slowest[length] > NO_SLOWER:
            break
        found = length
    return found


def right(line: Case) -> str | None:
    """Return right answers, with a star where fewer than by chance; None where there are none."""
    if "missed" in line:
        return None
    return f"{line['right']}{'*' if line['p'] < 0.05 else ''}"


def temperature(models: Sequence[Case], target: float) -> str:
    """Return every law's figures at one target, for each model."""
    header = ["law", "gain", "mean H", "mean deviation", "mean surprisal", "mean T", "T from", "to", "T at a bound"]
    header += ["gain V >= 2", "distinct 3-grams"]
    columns = ("law", "gain", "mean_entropy", "mean_absolute_deviation", "mean_surprisal", "mean_temperature")
    last = ("at_bound", "gain_times_varentropy_at_least_2", "distinct_3_grams")
    parts = []
    for model in models:
        [result] = [result for result in model["targets"] if result["target"] == target]
        lines = [
            [*[row[name] for name in columns], *row["temperature_range"], *[row[name] for name in last]]
            for row in result["laws"]
        ]
        parts.append(f"{model['model']}, target {target:g} nats:\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def selectors(cases: Sequence[Case]) -> str:
    """Return quality by selector and share of blocks read, for each model and text."""
    parts = []
    for case in cases:
        first, last = case["positions"]
        parts.append(
            f"{case['model']} on {case['text']}, positions {first} to {last}: dense loss {case['dense_loss']:.3f} nats "
            f"a token, mean entropy {case['mean_entropy']:.3f}:\n\n{_selectors(case)}"
        )
    return "\n\n".join(parts)


def _selectors(case: Case) -> str:
    by = {(line["selector"], line["wanted"]): line for line in case["selectors"]}
    names, shares = (list(dict.fromkeys(key)) for key in zip(*by, strict=True))
    head = [f"{what} at {share:.0%}" for share in shares for what in ("KL", "same token")]
    lines = []
    for name in names:
        cells: list[Any] = []
        for share in shares:
            line = by[name, share]
            off = "" if abs(line["share_read"] - share) < 0.02 else f" (reads {line['share_read']:.0%})"
            cells += [f"{line['divergence']:.3g}{off}", f"{line['agreement']:.1%}"]
        lines.append([name, f"{by[name, shares[0]]['share_looked_at']:.0%}", *cells])
    return table(["selector", "bytes to choose", *head], lines)


def tolerances(cases: Sequence[Case]) -> str:
    """Return quality by what sets the tolerance, for each model; bytes are over those of everything held."""
    keys = ("share_read", "divergence", "divergence_worst_5_percent", "agreement", "loss_added")
    head = ["bytes", "read", "KL", "KL, worst 5%", "same token", "loss added", "entropy's KL less this"]
    parts = []
    for case in cases:
        lines = []
        for line in case["tolerances"]:
            apart = None if line["tolerance"] == "entropy" else f"{line['difference']:.2g} ± {line['error']:.1g}"
            moved = line["share_read"] + line["share_looked_at"]
            named = [line["selector"], line["spread"], line["tolerance"], moved]
            lines.append([*named, *[line[key] for key in keys], apart])
        parts.append(f"{case['model']}:\n\n{table(['selector', 'spread', 'tolerance set by', *head], lines)}")
    return "\n\n".join(parts)


def selection_cost(cases: Sequence[Case]) -> str:
    """Return milliseconds, and time over that of dense, by size and contestant."""
    lines = [
        [
            f"{case['rows']} x {case['length'] // 1024}k",
            case["page_size"],
            name,
            case["share_listed"].get(name),
            ms,
            case["over_dense"][name],
        ]
        for case in cases
        for name, ms in case["milliseconds"].items()
    ]
    return table(["rows x tokens", "page", "what", "blocks listed", "ms", "over dense"], lines)


def with_interval(share: Sequence[float] | None) -> str | None:
    """Return a share with its interval, None where there is none."""
    return None if share is None else f"{share[0]:.3f} ({share[1]:.3f} to {share[2]:.3f})"


def kernels(rows: Sequence[Case]) -> str:
    """Return what decode attention takes, all blocks and a share of them, and what moves as many bytes beside it."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    lines = []
    for batch, context, name in dict.fromkeys((row["batch"], row["context"], row["name"]) for row in rows):
        own = {
            row["share"]: row for row in rows if (row["batch"], row["context"], row["name"]) == (batch, context, name)
        }
        each = [f"{1000 * own[share]['median_ms']:.0f}" if share in own else None for share in shares]
        lines.append([f"{batch} x {context // 1024}k", name, *each, own[1.0]["share_of_copy"]])
    return table(
        ["rows x tokens", "by", *(f"{share:g} read, us" for share in shares), "bytes a second, of a copy's"], lines
    )
