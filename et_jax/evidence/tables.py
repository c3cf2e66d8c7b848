"""The Markdown tables of each results file, from its JSON alone: what the scripts print and the documents show."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from et_jax.evidence.results import table

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


def quantized(quality: Case, speed: Sequence[Case]) -> str:
    """Return what a model in 8 bits knows and how fast it is, beside one in bfloat16; a star as in `right`."""
    tasks, more = quality["questions"], quality["nats_more"]
    plain, _ = quality["kinds"]
    known = [
        [
            one["kind"],
            one["bytes"] / 1e6,
            f"{one['perplexity']:.3f}",
            *[f"{one['right'][task]}{'*' if one is not plain and quality['p'][task] < 0.05 else ''}" for task in tasks],
        ]
        for one in quality["kinds"]
    ]
    header = ["weights", "MB", "perplexity", *[f"{task} (of {count})" for task, count in tasks.items()]]
    timed = [
        [
            {"decode": f"a step of {line['size']} rows", "prefill": f"a prompt of {line['size']}"}[line["what"]],
            *line["tokens_per_second"].values(),
            f"{line['ratio']:.2f}",
            f"{min(line['ratios']):.2f} to {max(line['ratios']):.2f}",
        ]
        for line in speed
    ]
    return (
        f"{table(header, known)}\n\nNats a token more in 8 bits: {more['mean']:.4f} ({more['low']:.4f} to "
        f"{more['high']:.4f}, 95%).\n\n"
        + table(["", "tokens/s, bfloat16", "tokens/s, int8", "ratio", "over the turns"], timed)
    )


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


def overhead(rows: Sequence[Case], large: Case) -> str:
    """Return what the estimator and the laws cost of a step; `together` is of all parts."""
    lines = []
    for row in rows:
        shares = row["median_share"]
        for name, us in row["median_us"].items():
            lines.append([row["batch"], name, us, f"{shares[name]:.2%}" if name in shares else None])
        lines.append([row["batch"], "together (target 2%)", None, f"{shares['together']:.2%}"])
    flops, moved = large["estimator_flops"] / large["token_flops"], large["estimator_bytes"] / large["weight_bytes"]
    return (
        f"{table(['rows', 'part', 'microseconds', 'share of the step'], lines)}\n\n"
        "On the shape of Llama-3-8B, with 128,256 tokens, one pass is "
        f"{flops:.3%} of a token's FLOPs and {moved:.3%} of the weights' bytes."
    )


def rows(found: Sequence[Case]) -> str:
    """Return a line for each of `found`, which all have the names of the header."""
    return table(list(found[0]), [list(one.values()) for one in found])


def sampling(cases: Sequence[Case], steps: Sequence[Case]) -> str:
    """Return milliseconds of a token of all rows and of its noise by generator, then of whole steps."""
    header = ["vocabulary", "rows", *cases[0]["milliseconds"]]
    lines = [[f"{case['vocab_size']:,}", case["rows"], *case["milliseconds"].values()] for case in cases]
    whole = [[step["rows"], *step["milliseconds"].values()] for step in steps]
    return (
        f"Milliseconds a token of all rows; from `hash` on, of the noise alone:\n\n{table(header, lines)}\n\n"
        f"Milliseconds a step of the bundled model:\n\n{table(['rows', *steps[0]['milliseconds']], whole)}"
    )


def experts(cases: Sequence[Case]) -> str:
    """Return what a layer's experts cost, by tokens and by the experts touched, in every form."""
    header = ["tokens", "experts touched", "MB read", *(f"{form}, ms" for form in cases[0]["milliseconds"])]
    lines = [
        [case["batch"], case["touched"], case["megabytes"], *case["milliseconds"].values(), case["ragged_over_loop"]]
        for case in cases
    ]
    return table([*header, "ragged / loop"], lines)


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
    """Return what a model gains that drafts for itself, by tokens cached, sequences, and how often drafts hold."""
    ways = list(dict.fromkeys(case["way"] for case in cases))
    names = [f"{float(way):.0%} hold" if way[0].isdigit() else f"{way}, trusted" for way in ways]
    lines = []
    for shape in dict.fromkeys((case["context"], case["sequences"]) for case in cases):
        own = {case["way"]: case for case in cases if (case["context"], case["sequences"]) == shape}
        plain = statistics.median(case["tokens_per_second"] for case in own.values())
        lines.append([*shape, plain, *(own[way]["ratio"] if way in own else None for way in ways)])
    return table(["tokens", "sequences", "plain, tokens/s", *names], lines)


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


def acceptance(cases: Sequence[Case]) -> str:
    """Return the share of drafted tokens accepted by every way of sampling alike, with its interval."""
    ways = ("optimum", "race", "sampled", "bound", "inverse CDF")
    lines = [
        [
            case["text"],
            f"{case['temperature']:g}" if case["temperature"] else "greedy",
            *(_with_interval(case["shares"].get(way)) for way in ways),
            f"{case['sigmas']:+.1f}" if "sigmas" in case else None,
        ]
        for case in cases
    ]
    return table(["text", "temperature", *ways, "sampled - race, standard errors"], lines)


def _with_interval(share: Sequence[float] | None) -> str | None:
    return None if share is None else f"{share[0]:.3f} ({share[1]:.3f} to {share[2]:.3f})"


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


def starts(found: Sequence[Case]) -> str:
    """Return seconds from the shell to the first token, cold and warm, by model, control and version."""
    lines: dict[tuple[str, ...], list[Any]] = {}
    for row in found:
        line = lines.setdefault((row["model"], row["case"], row["version"]), [])
        line += [row["wall"], row["processor"]]
    header = ["model", "control", "version", "cold: wall", "processor", "warm: wall", "processor"]
    return (
        f"Seconds from the shell to the first token:\n\n{table(header, [[*key, *took] for key, took in lines.items()])}"
    )


def throughput(rows: Sequence[Case]) -> str:
    """Return how fast many requests are served at once, compared with one at a time."""
    header = ["served", "tokens/s", "ratio", "in single rounds", "steps", "swapped out", "prompt tokens found"]
    lines = [
        [
            row["name"],
            row["tokens_per_second"],
            row["ratio"],
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
            int(row["steps"]),
            int(row["preemptions"]),
            f"{row['cached_prompt_tokens'] / row['prompt_tokens']:.0%}",
            int(row["compiled_late"]),
        ]
        for row in rows
    ]
    return table([*header, "compiled after warm-up"], lines)


def ray(found: Case) -> str:
    """Return how fast one engine and two are, in a process and as actors, what a line costs more, and of Ray alone."""
    over, alone = found["two_actors_over"], found["short_lines"]
    lines = []
    for way, one in found["ways"].items():
        pairs = over.get(way)
        rounds = None if pairs is None else f"{pairs['least_ratio']:.2f} to {pairs['most_ratio']:.2f}"
        extra = None if pairs is None else pairs["milliseconds_more_a_line"]
        idle = f"{one['idle_share']:.1%}"
        lines.append([way, one["tokens_per_second"], idle, one["seconds_before"], rounds, extra])
    header = ["by", "tokens/s", "idle slots", "seconds to start", "actors over it, single rounds", "ms more a line"]
    held = alone["driver_megabytes"]
    return (
        f"{table(header, lines)}\n\nThe load average at the start was {found['load_average_before']}. "
        f"{alone['lines']:,} short lines through `map_batches`, with a model that answers at once: "
        f"{alone['lines_per_second']:,.0f} lines a second; the driver held {held[0]:.0f} MB after a tenth of them and "
        f"{held[-1]:.0f} MB at the end."
    )


def scheduling(cases: Sequence[Case]) -> str:
    """Return the figures of every priority rule, and what some come to over others, for each model, trace and load."""
    header = ["rule", "mean latency", "median", "99th percentile", "first token", "tokens/step", "nats at half time"]
    header += ["nats/MB", "longest wait", "bound"]
    ratio_header = ["rule", "over", "mean latency", "median", "first token", "nats/MB"]
    parts = []
    for case in cases:
        ratios = [
            (ratio["rule"], ratio["over"], *map(_with_interval, list(ratio.values())[2:])) for ratio in case["ratios"]
        ]
        parts += [
            f"{case['load']:g} times the tokens that fit; model {case['model']}, arrivals of {case['trace']}, lengths "
            f"{case['lengths']}: {case['mean_tokens']:.0f} tokens, deviation {case['variation']:.2f} of that:",
            table(header, [list(row.values()) for row in case["rows"]]),
            table(ratio_header, ratios),
        ]
    return "\n\n".join(parts)


def switching(lines: Sequence[Case], questions: int) -> str:
    """Return what either of two models and every way of taking turns comes to, over the model alone."""
    taken = ("cost_alone", "cost_of_eight", "flops_alone")
    told = ("agreement", "log p, nats", "tasks right", "by a coin", "bytes", "bytes, of eight", "FLOPs")
    header = ("who speaks", "bound, bits (nats)", "the model's share", *told)
    rows = [
        (
            line["speaker"],
            None if line["bits"] is None else f"{line['bits']:g} ({line['bits'] * math.log(2):.3g})",
            f"{100 * line['share']:.0f}%",
            _with_interval(line["agreement"]),
            _with_interval(line["log_probability"]),
            f"{line['right']} of {questions}{_share_on_tasks(line)}",
            f"{line['by_coin']['right']}{_share_on_tasks(line['by_coin'])}" if "by_coin" in line else None,
            *(f"{line[field]:.2f}" for field in taken),
        )
        for line in lines
    ]
    large, small = (100 * line["certain_windows"] for line in lines[:2])
    return (
        f"{table(header, rows)}\n\nOf the windows of five tokens {large:.2g}% have a mean entropy of at most 0.25 bits "
        f"where the model speaks alone, and {small:.2g}% where the small one does."
    )


def _share_on_tasks(line: Case) -> str:
    """The model's share of the words of answers."""
    return "" if line["task_share"] is None else f", {line['task_share']:.0%}"
