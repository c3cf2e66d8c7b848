"""Measurements of serving, and of what models are held in, as the tables that the docs show."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from et_jax.evidence.tables import Case, with_interval
from scripts.measuring.results import table


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


def cached(quality: Case, speed: Sequence[Case]) -> str:
    """Return what a model with a cache in 8 bits knows and how fast it is, beside bfloat16; a star as in `right`."""
    tasks = quality["questions"]
    known = [
        [
            one["kind"],
            f"{one['token_bytes']:,}",
            f"{one['perplexity']:.3f}",
            f"{more['mean']:.4f} ({more['low']:.4f} to {more['high']:.4f})",
            *[f"{one['right'][task]}{'*' if one['p'][task] < 0.05 else ''}" for task in tasks],
        ]
        for one in quality["kinds"]
        for more in [one["nats_more"]]
    ]
    header = ["cache", "bytes a token", "perplexity", "nats a token more (95%)"]
    off = [[one["kind"], one["scales"], f"{one['keys']:.2%}", f"{one['values']:.2%}"] for one in quality["rounding"]]
    timed = [
        [
            {"decode": f"a step over {line['size']:,} tokens", "prefill": f"a prompt of {line['size']:,}"}[
                line["what"]
            ],
            line["tokens_per_second"]["bfloat16"],
            *[
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                for kind, ratios in line["ratios"].items()
                if kind != "bfloat16"
            ],
        ]
        for line in speed
    ]
    return (
        table([*header, *[f"{task} (of {count})" for task, count in tasks.items()]], known)
        + "\n\nHow far keys and values are off, as a share of their root mean square, by the scales:\n\n"
        + table(["cache", "scales", "keys", "values"], off)
        + "\n\nTokens a second, and how many times those of a cache in bfloat16, over the turns:\n\n"
        + table(["", "bfloat16", "int8", "fp8"], timed)
    )


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


def versions(rows: Sequence[Case]) -> str:
    """Return how many tokens a second an older version served, and this one."""
    header = ["model", "slots", "control", "served", "before, tokens/s", "now", "ratio", "in single rounds"]
    lines = []
    for row in rows:
        ratios = [now / before for before, now in row["rounds"]]
        what = f"one, {row['alone']} tokens kept" if row["alone"] else "short prompts, all slots"
        single = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append([row["model"], row["rows"], row["case"], what, row["before"], row["now"], row["ratio"], single])
    return table(header, lines)


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
            (ratio["rule"], ratio["over"], *map(with_interval, list(ratio.values())[2:])) for ratio in case["ratios"]
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
            with_interval(line["agreement"]),
            with_interval(line["log_probability"]),
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


def peers(cases: Sequence[Case], agreed: Sequence[Case]) -> str:
    """Return tokens a second of every engine and form, how many times those et_jax's are, and where it loses."""
    forms = list(cases[0]["ways"][0]["et_jax_over_it"])
    header = ["sequences", "engine", "weights", "tokens/s", "in single rounds", "steps/s", "first token, ms"]
    header += [f"et_jax {form} over it" for form in forms]
    lines, lost = [], []
    for case in cases:
        for way in case["ways"]:
            over = way["et_jax_over_it"]
            lines.append(
                [
                    case["batch"],
                    way["engine"],
                    way["form"],
                    way["tokens_per_second"],
                    f"{way['slowest']:.1f} to {way['fastest']:.1f}",
                    way["steps_per_second"],
                    1e3 * way["first_token_seconds"],
                    *(_beside(way, form, one) for form, one in over.items()),
                ]
            )
            lost += [
                f"{form} at {case['batch']} to {way['engine']} {way['form']} ({one['ratio']:.2f})"
                for form, one in over.items()
                if way["engine"] != "et_jax" and one["ratio"] < 1
            ]
    same = [f"{one['engine']} {one['together']} of {one['tokens']}" for one in agreed]
    return (
        f"{table(header, lines)}\n\net_jax loses: {', '.join(lost) or 'nowhere'}.\n\n"
        f"Greedy tokens that agree from the start in float32: {', '.join(same)}."
    )


def _beside(way: Case, form: str, over: Case) -> str | None:
    if (way["engine"], way["form"]) == ("et_jax", form):
        return None
    return f"{over['ratio']:.2f} ({over['least']:.2f} to {over['most']:.2f})"


def four_bits(cases: Sequence[Case]) -> str:
    """Return what a product takes with weights of 4 bits in every form, beside others."""
    header = ["rows", *(f"{form}, ms (over 8 bits)" for form in cases[0]["milliseconds"])]
    lines = [
        [
            case["rows"],
            *(f"{took:.1f} ({case['over_8_bits'][form]:.1f})" for form, took in case["milliseconds"].items()),
        ]
        for case in cases
    ]
    return table(header, lines)
