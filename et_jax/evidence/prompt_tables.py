"""Tables of prompts read in part and of caches that shrink, as Markdown, of lines as their scripts write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from et_jax.evidence.tables import Case, right, saving
from scripts.measuring.results import table


def prefill(cases: Sequence[Case]) -> str:
    """Return seconds of a layer's attention and of the whole prefill, and their ratios to dense, for each case."""
    header = ["read", "attention, s", "over dense", "whole prefill, s", "over dense"]
    return table(header, [[case["read"], *case["attention"].values(), *case["prefill"].values()] for case in cases])


def prefill_budgets(lines: Sequence[Case], questions: Sequence[Case]) -> str:
    """Return what each budget saves of a constant one's divergence, by share read; right answers."""
    by_arm: dict[str, dict[float, Case]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], {})[line["share"]] = line
    shares = list(dict.fromkeys(line["share"] for line in lines))
    whole = table(
        ["budget", *[f"{share:.3g} read" for share in shares]],
        [[arm, *[saving(found.get(share)) for share in shares]] for arm, found in by_arm.items()],
    )
    return f"{whole}\n\n{_answers(questions)}"


def printed_budgets(lines: Sequence[Case]) -> str:
    """Return what EntropyInfer's budgets save of the divergence of constant ones, of one size and at equal blocks."""
    keys = ("tokens", "arm", "share_read", "divergence", "loss")
    rows = []
    for line in lines:
        equal = None
        if "equal" in line:
            equal = f"{saving({'saving': line['saving_at_equal']})}; it reads {line['equal']['share_read']:.3g}"
        rows.append([*[line[key] for key in keys], saving(line), equal])
    return table(["B_0", "budget", "share read", "KL", "loss", "saves", "over a constant that reads as much"], rows)


def compression(
    policies: Sequence[Case], waits: Sequence[Case], questions: Sequence[Case], reranked: Sequence[Case]
) -> str:
    """Return what policies save of SnapKV's divergence, at equal entries read and held; by waits; right answers.

    A star stands where there are fewer than by chance: of the whole cache's, or of the other ranking's.
    """
    shares = list(dict.fromkeys(line["share"] for line in policies))
    arms = list(dict.fromkeys(line["arm"] for line in policies))
    found = {(line["equal"], line["arm"], line["share"]): line for line in policies}
    parts = [
        table(
            [f"policy, equal entries {equal}", *[f"{share:.3g} of them" for share in shares]],
            [
                [arm, *[saving(found.get((equal, arm, share), found["read", arm, share])) for share in shares]]
                for arm in arms
            ],
        )
        for equal in ("read", "held")
    ]
    by_wait = {(line["waited"], line["share"]): line for line in waits}
    waited = list(dict.fromkeys(line["waited"] for line in waits))
    parts.append(
        table(
            ["tokens decoded before", *[f"{share:.3g} of them" for share in shares]],
            [[wait, *[saving(by_wait[wait, share]) for share in shares]] for wait in waited],
        )
    )
    for point in dict.fromkeys(line["compressed"] for line in questions):
        found_at = {(one["task"], one["arm"], one["share"]): one for one in questions if one["compressed"] == point}
        tasks = {task: one for (task, _, _), one in found_at.items()}
        rows = [
            [task, f"{one['dense']}/{one['questions']}", arm, *[right(found_at[task, arm, share]) for share in shares]]
            for task, one in tasks.items()
            for arm in arms
        ]
        parts.append(table([f"compressed {point}", "whole cache", "policy", *[f"{one:.3g}" for one in shares]], rows))
    ends = {(one["task"], one["waited"], one["arm"], one["share"]): one for one in reranked}
    rows = [
        [task, wait, f"{dense}/{asked}", *[_both(ends, task, wait, share) for share in shares]]
        for task, wait, dense, asked in dict.fromkeys(
            (one["task"], one["waited"], one["dense"], one["questions"]) for one in reranked
        )
    ]
    header = ["ends of answers", "tokens decoded before", "whole cache", *[f"{one:.3g}" for one in shares]]
    parts.append(f"Right by the prompt's queries, and by those decoded too:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _both(ends: Mapping[Any, Case], task: str, wait: int, share: float) -> str:
    one, other = (ends[task, wait, arm, share] for arm in ("snapkv", "latent"))
    return f"{one['right']}{'*' if other['p'] < 0.05 else ''} and {other['right']}"


def _answers(questions: Sequence[Case]) -> str:
    """Return right answers by task, budget and share read; a star where fewer than by chance."""
    shares = list(dict.fromkeys(line["share"] for line in questions))
    by_line: dict[tuple[str, str, str], dict[float, Case]] = {}
    for line in questions:
        key = line["task"], line["arm"], f"{line['dense']}/{line['questions']}"
        by_line.setdefault(key, {})[line["share"]] = line
    rows = [
        [task, arm, dense, *[right(found[share]) if share in found else None for share in shares]]
        for (task, arm, dense), found in by_line.items()
    ]
    return table(["task", "budget", "all read", *[f"{share:.3g} read" for share in shares]], rows)


def compression_cost(cases: Sequence[Case]) -> str:
    """Return pages held and milliseconds of a step by the tokens of a text, with a cache budget and without."""
    header = ["cache", "tokens of text", "pages held", "ms a step", "over the shortest text"]
    return table(header, [[case[key] for key in ("cache", "tokens", "pages", "ms", "over")] for case in cases])


def asked_amid(lines: Sequence[Case]) -> str:
    """Return right answers amid prompts by task and budget, with the share read; a star where fewer than by chance."""
    shares = list(dict.fromkeys(line["share"] for line in lines))
    by_line: dict[tuple[str, str, str], dict[float, Case]] = {}
    for line in lines:
        key = line["task"], line["arm"], f"{line['dense']}/{line['questions']}"
        by_line.setdefault(key, {})[line["share"]] = line

    def told(line: Case | None) -> str | None:
        return None if line is None else f"{right(line)}, {line['share_read']:.1%}"

    rows = [
        [task, arm, dense, *[told(found.get(share)) for share in shares]]
        for (task, arm, dense), found in by_line.items()
    ]
    return table(["task", "budget", "all read", *[f"{share:.3g} asked for" for share in shares]], rows)


def long_answers(lines: Sequence[Case]) -> str:
    """Return the rests of answers said to their end, and the share of their tokens, by N_d, policy and entries."""
    shares = list(dict.fromkeys(line["share"] for line in lines))
    by_line: dict[tuple[float, int, str], dict[float, Case]] = {}
    for line in lines:
        by_line.setdefault((line["tokens"], line["waited"], line["arm"]), {})[line["share"]] = line
    rows = []
    for (tokens, waited, arm), found in by_line.items():
        one = next(iter(found.values()))
        dense = f"{one['dense']}/{one['questions']}, {one['dense_share']:.0%}"
        each = [f"{found[share]['right']}, {found[share]['share_right']:.0%}" for share in shares]
        rows.append([f"{tokens:.0f}", waited, arm, dense, *each])
    return table(["tokens", "N_d", "ranked by", "whole cache", *[f"{share:.3g}" for share in shares]], rows)
